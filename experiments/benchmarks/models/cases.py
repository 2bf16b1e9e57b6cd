"""A model from its config with random weights, and one random batch as its users have it."""

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
    """A model in eval mode and one batch."""

    model: nn.Module
    inputs: Inputs
    targets: Tensor

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


def build_case(settings: Mapping[str, Any], generator: torch.Generator, device: torch.device) -> Case:
    """Return the model of a config and a batch for it.

    Args:
        settings: `model` (instantiated by Hydra), `batch_size`, `num_outputs` (classes, or the vocabulary), and
            `inputs`: images (`shape`: C, H, W), sentences with a class each, text with a target for each token
            (`shape`: T), or summaries (`shape`: S, T).
        generator: of weights and data.
        device: where they go.
    """
    with seeded_by(generator):
        model = instantiate(dict(settings["model"]), _convert_="all").eval()
    size, shape, num_outputs = settings["batch_size"], tuple(settings["shape"]), settings["num_outputs"]
    draw = {"images": _images, "sentences": _sentences, "text": _text, "summaries": _summaries}[settings["inputs"]]
    inputs, targets = draw(size, shape, num_outputs, settings.get("vocabulary", num_outputs), generator)
    if isinstance(inputs, dict):
        inputs = {name: value.to(device) for name, value in inputs.items()}
    else:
        inputs = inputs.to(device)
    return Case(model.to(device), inputs, targets.to(device))


def _images(
    size: int, shape: tuple[int, ...], num_outputs: int, vocabulary: int, generator: torch.Generator
) -> tuple[Inputs, Tensor]:
    pixels = torch.randn(size, *shape, generator=generator)
    return pixels, torch.randint(num_outputs, (size,), generator=generator)


def _tokens(size: int, length: int, vocabulary: int, generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(2, vocabulary, (size, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _sentences(
    size: int, shape: tuple[int, ...], num_outputs: int, vocabulary: int, generator: torch.Generator
) -> tuple[Inputs, Tensor]:
    return (
        _tokens(size, shape[0], vocabulary, generator),
        torch.randint(num_outputs, (size,), generator=generator),
    )


def _text(
    size: int, shape: tuple[int, ...], num_outputs: int, vocabulary: int, generator: torch.Generator
) -> tuple[Inputs, Tensor]:
    inputs = _tokens(size, shape[0], vocabulary, generator)
    ids = inputs["input_ids"]
    return inputs, torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORED)], dim=1)


def _summaries(
    size: int, shape: tuple[int, ...], num_outputs: int, vocabulary: int, generator: torch.Generator
) -> tuple[Inputs, Tensor]:
    inputs = _tokens(size, shape[0], vocabulary, generator)
    written = torch.randint(2, vocabulary, (size, shape[1]), generator=generator)
    read = torch.cat([torch.zeros_like(written[:, :1]), written[:, :-1]], dim=1)
    return inputs | {"decoder_input_ids": read}, written
