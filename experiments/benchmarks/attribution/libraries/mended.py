"""What public libraries lack here, or do wrong, mended; nothing of this repository is imported, see networks."""

# mypy: disable-error-code="import-not-found"
# The libraries are installed elsewhere.

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]


# ----------------------------------------------------------------------------------------- dattri
def mended(attributor: Any) -> Any:
    """Return dattri 0.3.0's EK-FAC with two steps put right, for layers with biases.

    Q_S V Q_Aᵀ becomes Q_Sᵀ V Q_A, of eigenvectors in columns; biases, each layer's behind its weights, stay whole.
    """
    from dattri.func import fisher

    # Replaced in this process, which measures one method; a repeated call finds it replaced.
    estimated = getattr(fisher.estimate_eigenvector, "shipped", fisher.estimate_eigenvector)

    def turned(found: Any) -> Any:
        return {name: (a.T, s.T) for name, (a, s) in estimated(found).items()}

    turned.shipped = estimated  # type: ignore[attr-defined]
    fisher.estimate_eigenvector = turned

    class Mended(attributor):
        def transform_test_rep(self, ckpt_idx: int, test_rep: Tensor) -> Tensor:
            found = []
            for name in self.module_name:
                shape, (q_a, q_s) = self.name_to_module[name].weight.shape, self.cached_q[name]
                sizes = [shape.numel(), shape[0], test_rep.shape[1] - shape.numel() - shape[0]]
                weight, bias, test_rep = test_rep.split(sizes, dim=1)
                v = torch.cat([weight.reshape(-1, *shape), bias[:, :, None]], dim=2)
                inverse = q_s.T @ ((q_s @ v @ q_a.T) / (self.cached_lambdas[name] + self.damping)) @ q_a
                found += [inverse[:, :, :-1].flatten(1), inverse[:, :, -1]]
            return torch.cat(found, dim=1)

    return Mended


# ----------------------------------------------------------------------------------------- TRAK
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


# ----------------------------------------------------------------------------------------- bergson
def bergson_scores(model: nn.Module, train: Pair, test: Pair, *, damping: float | None, num_steps: int) -> Tensor:
    """Return the scores of bergson's EK-FAC, (N, M): positive ones are helpful; in units of the mean over tokens.

    bergson 2.5.1 runs on a CPU, but takes no OPT as it is, and no model by its conjugate gradients. Mended here:

    - its hooks want the inputs of a layer as (B, T, D), and end at OPT's feed-forward layers, which get (B·T, D)
      ("Expected input of shape [N, S, I]"): they get those of `networks.LanguageModel`;
    - without a GPU its conjugate gradients update a tensor over a memory map that is open for reading alone, and
      the process dies (segmentation fault at `x[n].add_` of astra.py): they get a copy.

    Args:
        model: a transformers OPT with the layers of `networks.LanguageModel`, or a GPT-2.
        train: tokens and the tokens that follow, (N, T) each.
        test: the same, (M, T).
        damping: added to the eigenvalues of each layer; None: its own, a tenth of their mean.
        num_steps: of conjugate gradients after EK-FAC, preconditioned by it, on all examples; 0: none.
    """
    import datasets
    import tokenizers
    import transformers
    from bergson import config
    from bergson.config.config import AstraConfig, HessianConfig, HessianPipelineConfig, InversionConfig
    from bergson.data import load_scores
    from bergson.hessians import astra
    from bergson.hessians.pipeline import hessian_pipeline

    refine = astra.Astra.refine

    def with_a_copy(self: Any, query: Any, start: dict[str, Tensor], row: int) -> Any:
        return refine(self, query, {name: own.clone() for name, own in start.items()}, row)

    one_longer = _one_longer(model)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(transformers.AutoModelForCausalLM, "from_pretrained") as load,
        mock.patch.object(astra.Astra, "refine", with_a_copy),
    ):
        load.side_effect = lambda *_, **__: copy.deepcopy(one_longer)
        words = {str(token): token for token in range(int(one_longer.config.vocab_size))}  # type: ignore[union-attr,arg-type]
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
        size, length = len(train[0]), train[0].shape[1] + 1
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length)
        fast.save_pretrained(folder)
        one_longer.config.save_pretrained(folder)  # type: ignore[union-attr,operator]
        for name, (tokens, following) in (("train", train), ("test", test)):
            rows = torch.cat([tokens, following[:, -1:]], dim=1).tolist()
            datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(Path(folder) / name)
        own = {"inversion": "absolute_damped_inverse", "damping_factor": damping} if damping is not None else {}
        of_data = {"model": folder, "data": config.DataConfig(dataset=f"{folder}/train")}
        of_loss = {"token_batch_size": length, "loss_reduction": "mean", "include_bias": True}
        astra_config = AstraConfig(num_steps=num_steps, solver="cg", batch_size=size, micro_batch_size=size)
        query = config.QuerySetConfig(dataset=f"{folder}/test", aggregation="none")
        hessian_pipeline(
            config.IndexConfig(run_path=f"{folder}/run", **of_data, **of_loss),
            HessianConfig(method="kfac", ev_correction=True),
            config.ScoreConfig(),
            config.PreprocessConfig(),
            HessianPipelineConfig(query=query, inversion_cfg=InversionConfig(**own), astra=astra_config),
        )
        return torch.tensor(load_scores(Path(folder) / "run" / "scores")[:])


def _one_longer(model: nn.Module) -> nn.Module:
    """Return a copy that takes a token more, whose prediction no loss reads, and tells its layers how many."""
    model = copy.deepcopy(model)
    config: Any = model.config
    base: Any = model.base_model
    positions = base.decoder.embed_positions if config.model_type == "opt" else base.wpe
    weight = positions.weight.data
    positions.weight = nn.Parameter(torch.cat([weight, torch.zeros_like(weight[:1])]))
    config.max_position_embeddings += 1
    if config.model_type != "opt":
        return model

    def note_the_length(own: Any, arguments: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        tokens = arguments[0] if arguments else named["input_ids"]
        own.model.decoder.layers[0].fc1[0].length = tokens.shape[1]  # one module, in every layer

    model.register_forward_pre_hook(note_the_length, with_kwargs=True)
    return model
