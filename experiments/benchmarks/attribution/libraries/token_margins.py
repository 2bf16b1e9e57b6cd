"""What TRAK is told of a language model. Nothing of this repository is imported: see networks.py."""

# mypy: disable-error-code="import-not-found"
# TRAK is installed elsewhere.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def token_margins() -> Any:
    """Return a model output of language models for TRAK, which ships none.

    That of its image classification, log p/(1 - p) of what is right, as mean over tokens; so its weights 1 - p.
    """
    from torch.func import functional_call
    from trak.modelout_functions import AbstractModelOutput

    class TokenMargins(AbstractModelOutput):
        def __init__(self) -> None:
            pass

        @staticmethod
        def get_output(model: nn.Module, weights: Any, buffers: Any, tokens: Tensor, targets: Tensor) -> Tensor:
            logits = functional_call(model, (weights, buffers), tokens[None])[0].T  # (T, V)
            right = torch.arange(logits.shape[1]) == targets[:, None]  # vmap has no one_hot
            others = logits.masked_fill(right, -torch.inf).logsumexp(1)
            return (logits.gather(1, targets[:, None])[:, 0] - others).mean()

        def get_out_to_loss_grad(self, model: nn.Module, weights: Any, buffers: Any, batch: Any) -> Tensor:
            tokens, targets = batch
            probabilities = functional_call(model, (weights, buffers), tokens).softmax(1)
            return (1 - probabilities.gather(1, targets[:, None])[:, 0]).mean(1, keepdim=True).detach()

    return TokenMargins()
