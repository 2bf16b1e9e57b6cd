"""A network from its config with random weights, and one random batch as its users have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hydra.utils import instantiate
from torch import Tensor, nn

from curvlab.seeding import seeded_by

Inputs = Tensor | dict[str, Tensor]
IGNORED = -100


@dataclass(frozen=True)
class Case:
    """A network in eval mode, one batch, and where random vectors come from."""

    model: nn.Module
    inputs: Inputs
    targets: Tensor
    generator: torch.Generator

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All of them."""
        return list(self.model.parameters())

    @property
    def num_parameters(self) -> int:
        """P."""
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def held(self) -> int:
        """Bytes of parameters, buffers and the batch."""
        inputs = [self.inputs] if isinstance(self.inputs, Tensor) else list(self.inputs.values())
        tensors = [*self.parameters, *self.model.buffers(), *inputs, self.targets]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def loss(self) -> Tensor:
        """Return the mean cross-entropy, as a training loop has it."""
        found = self.model(**self.inputs) if isinstance(self.inputs, dict) else self.model(self.inputs)
        logits: Tensor = found if isinstance(found, Tensor) else found.logits
        return nn.functional.cross_entropy(logits.flatten(0, -2), self.targets.flatten())

    def vectors(self, count: int) -> Tensor:
        """Return random vectors as contiguous columns, (P, K)."""
        return torch.randn(count, self.num_parameters, generator=self.generator).to(self.targets.device).T


def build_case(settings: Mapping[str, Any], generator: torch.Generator, device: torch.device) -> Case:
    """Return the network of a config and a batch for it.

    Args:
        settings: `model` (instantiated by Hydra), `batch_size`, `num_outputs` (classes, or the vocabulary), and
            `inputs`: images (`shape`: any), tokens with a target for each (`shape`: T), and of Hugging Face
            models, which take mappings, sentences with a class each, text (likewise `shape`: T), or summaries
            (`shape`: S, T).
        generator: of weights and data.
        device: where they go.
    """
    with seeded_by(generator):
        model = instantiate(dict(settings["model"]), _convert_="all").eval()
    size, shape, num_outputs = settings["batch_size"], tuple(settings["shape"]), settings["num_outputs"]
    if settings["inputs"] == "images":
        images = torch.randn(size, *shape, generator=generator).to(device)
        targets = torch.randint(num_outputs, (size,), generator=generator)
        return Case(model.to(device), images, targets.to(device), generator)
    if settings["inputs"] == "tokens":
        tokens, targets = (torch.randint(num_outputs, (size, *shape), generator=generator) for _ in range(2))
        return Case(model.to(device), tokens.to(device), targets.to(device), generator)
    ids = torch.randint(2, settings.get("vocabulary", num_outputs), (size, shape[0]), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if settings["inputs"] == "sentences":
        targets = torch.randint(num_outputs, (size,), generator=generator)
    elif settings["inputs"] == "text":
        targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORED)], dim=1)
    else:  # the decoder reads what it has to write, one behind
        targets = torch.randint(2, num_outputs, (size, shape[1]), generator=generator)
        inputs["decoder_input_ids"] = torch.cat([torch.zeros_like(targets[:, :1]), targets[:, :-1]], dim=1)
    moved = {name: value.to(device) for name, value in inputs.items()}
    return Case(model.to(device), moved, targets.to(device), generator)
