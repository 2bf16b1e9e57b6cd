"""Batches that hold their labels, as collators make them, read the way the model's own loss reads them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from curvlab.problem.batch import Batch, checked_batch, num_examples
from curvlab.problem.model_function import ModelFunction, eval_mode

# Names of the labels, as the Hugging Face Trainer and its collators take them.
LABELS = ("labels", "label", "label_ids")
_IGNORED = -100
# Classes of transformers whose loss shifts the labels itself; None is what it takes for a class it does not know.
_SHIFTING = ("ForCausalLM", "ForConditionalGeneration", None)
_EXAMPLES_TRIED = 4
_RTOL = 1e-4
_RTOL_HALF = 2e-2  # some models compute the loss in their own precision


class PairFromMapping:
    """Turns {"input_ids": ..., "labels": ...} into (inputs, targets) with one target for each of the logits.

    The mean of nn.CrossEntropyLoss() over such a batch is `model(**batch).loss`:
    - classes of sequences, images or tokens, and masked tokens: the labels as they are;
    - causal language models: the labels shifted by one, since logits at t predict token t + 1; -100 at the end;
    - encoder-decoder models: the labels as they are, and `decoder_input_ids` made from them where there are none,
      by the model's own `prepare_decoder_input_ids_from_labels`;
    - regression to one number: the labels with a last axis, as nn.MSELoss() needs them beside logits (N, 1).
    -100 marks labels that do not count. Which case it is, the model's class says, and its own loss on the first
    examples confirms, or decides; what fits neither is refused. Entries that the model's forward does not take are
    left out, as the Trainer does.

    Args:
        model: also one wrapped by peft, in any mode.

    Cost: two forwards of four examples, once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._makes_decoder_inputs = bool(_config(model, "is_encoder_decoder"))
        self._shifted = False
        self._as_column = False
        self._decided = False

    @cached_property
    def _taken(self) -> frozenset[str] | None:
        return _arguments(self._model)

    def __call__(self, batch: Any) -> Batch:
        """Return the batch as a checked pair; pairs pass as they are."""
        return checked_batch(self._pair(batch) if isinstance(batch, Mapping) else batch)

    def columns(self, example: Any) -> Any:
        """Return a mapping without the entries that neither the model takes nor are labels; else the same."""
        if not isinstance(example, Mapping) or self._taken is None:
            return example
        return {name: value for name, value in example.items() if name in self._taken or name in LABELS}

    def _pair(self, batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
        entries = dict(self.columns(batch))
        names = [name for name in LABELS if name in entries]
        if not names or len(entries) == 1:
            raise TypeError(
                f"the batch is a mapping of {sorted(batch)}, without {'labels' if not names else 'inputs'}: add "
                "'labels' as the model's own loss takes them, or pass a pair (inputs, targets) with a mapping as "
                "its inputs."
            )
        for name, value in entries.items():
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"'{name}' holds {type(value).__name__}, not a tensor: give a data set of Hugging Face as "
                    "dataset.with_format('torch'), and examples of different lengths through a collator, "
                    "DataLoader(dataset, batch_size=..., collate_fn=DataCollatorWithPadding(tokenizer))."
                )
        labels = entries.pop(names[0])
        for name in names[1:]:  # of another name beside them: no input, unless the forward takes it
            if self._taken is not None and name not in self._taken:
                del entries[name]
        ids = entries.get("input_ids")
        scalars = any(value.ndim == 0 for value in [*entries.values(), labels])
        if scalars or num_examples(entries) != len(labels) or (ids is not None and ids.ndim == 1):
            shapes = {name: tuple(value.shape) for name, value in (entries | {"labels": labels}).items()}
            raise ValueError(
                f"a batch needs one row for each example in every entry, got shapes {shapes}. Single examples "
                "become batches in a DataLoader(dataset, batch_size=...)."
            )
        labels = labels if labels.is_floating_point() else labels.long()
        if self._makes_decoder_inputs and not {"decoder_input_ids", "decoder_inputs_embeds"} & set(entries):
            entries["decoder_input_ids"] = self._decoder_inputs(labels)
        if not self._decided:
            self._decide(entries, labels)
        return entries, self._targets(labels, shifted=self._shifted)

    def _decoder_inputs(self, labels: Tensor) -> Tensor:
        prepare = getattr(self._model, "prepare_decoder_input_ids_from_labels", None)
        if prepare is None:
            raise TypeError(
                f"{type(self._model).__name__} does not say what its decoder reads for given labels: "
                "put 'decoder_input_ids' into the batch, as DataCollatorForSeq2Seq(tokenizer, model=model) does."
            )
        made: Tensor = prepare(labels=labels)
        return made

    def _targets(self, labels: Tensor, *, shifted: bool) -> Tensor:
        if shifted:
            return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], _IGNORED)], dim=1)
        return labels.unsqueeze(-1) if self._as_column else labels

    @torch.no_grad()
    def _decide(self, entries: Mapping[str, Tensor], labels: Tensor) -> None:
        """Find out by the model's own loss on the first examples whether it shifts labels."""
        function, rows = ModelFunction(self._model), slice(0, _EXAMPLES_TRIED)

        def moved(tensor: Tensor) -> Tensor:
            return tensor[rows].to(function.device, function.dtype if tensor.is_floating_point() else None)

        inputs, labels = {name: moved(value) for name, value in entries.items()}, moved(labels)
        with eval_mode(self._model):  # without dropout
            logits = function(function.parameters, inputs)
            own = self._own_loss(function, inputs, labels)
        self._as_column = labels.is_floating_point() and logits.shape == (*labels.shape, 1)
        sequences = labels.ndim == 2 and not labels.is_floating_point()
        likely = sequences and _shifts(function.model)
        if own is None:
            if sequences:
                raise ValueError(
                    f"{type(function.model).__name__} computes no loss of its own from labels, so whether the "
                    "label at t belongs to the output at t or before it is not known: pass pairs (mapping of "
                    "inputs, targets), with one target for each position of the outputs."
                )
            self._decided = True
            return
        readings = {
            shifted: mean_losses(logits, self._targets(labels, shifted=shifted))
            for shifted in ([likely, not likely] if sequences else [False])
        }
        if not math.isfinite(own):  # no label of these examples counts: the next batch decides
            self._shifted = likely
            return
        half = logits.dtype in (torch.float16, torch.bfloat16)
        for rtol in (_RTOL, _RTOL_HALF) if half else (_RTOL,):
            for shifted, losses in readings.items():
                if any(abs(loss - own) <= rtol * max(1.0, abs(own)) for loss in losses):
                    self._shifted, self._decided = shifted, True
                    return
        found = ", ".join(f"{loss:.6g}" for losses in readings.values() for loss in losses) or "none that fits"
        raise ValueError(
            f"{type(function.model).__name__}'s own loss of the first {len(labels)} examples is {own:.6g}, and no "
            f"plain loss of its logits {tuple(logits.shape)} with the labels {tuple(labels.shape)} is ({found}): "
            "pass pairs (mapping of inputs, targets), with the targets as your loss takes them."
        )

    def _own_loss(self, function: ModelFunction, inputs: Mapping[str, Tensor], labels: Tensor) -> float | None:
        if isinstance(self._model, nn.Sequential):
            return None
        if self._taken is not None and "labels" not in self._taken:
            return None
        config: Any = getattr(self._model, "config", None)
        kind = getattr(config, "problem_type", None)
        try:
            return function.own_loss({**inputs, "labels": labels})
        finally:
            if hasattr(config, "problem_type"):  # transformers keeps there what the labels looked like
                config.problem_type = kind


def mean_losses(logits: Tensor, targets: Tensor) -> Sequence[float]:
    """Return the plain means that a model's own loss may be: cross-entropy, or squared error and its like."""
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if not targets.is_floating_point():
        if logits.shape[:-1] != targets.shape:
            return ()
        return (float(functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=_IGNORED)),)
    if logits.shape != targets.shape:
        return ()
    targets = targets.to(logits)
    losses = (functional.mse_loss(logits, targets), functional.binary_cross_entropy_with_logits(logits, targets))
    return tuple(float(loss) for loss in losses)


def _shifts(model: nn.Module) -> bool:
    """Whether a model's class says that its loss compares logits at t with the label at t + 1."""
    if not hasattr(model, "loss_type") or _config(model, "is_encoder_decoder"):
        return False
    return model.loss_type in _SHIFTING


def _config(model: nn.Module, name: str) -> Any:
    return getattr(getattr(model, "config", None), name, None)


def _arguments(model: nn.Module) -> frozenset[str] | None:
    """Return the names that the forward takes; None where it takes any, of a module that is not transformers'."""
    unwrap: Any = getattr(model, "get_base_model", None)  # of peft
    base: Any = model if unwrap is None else unwrap()
    if isinstance(base, nn.Sequential):  # hands on what it is given
        return None
    parameters = inspect.signature(base.forward).parameters.values()
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    if takes_any and not hasattr(base, "main_input_name"):
        return None
    return frozenset(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
