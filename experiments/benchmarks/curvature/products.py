"""What bench-curvature measures: a forward, a gradient, and products with K vectors by each library."""

# mypy: disable-error-code="import-not-found"
# The peers need not be there.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.lab.models import build_model

Compute = Callable[[], Any]


class NotInstalledError(Exception):
    """The library of a method is not there."""


@dataclass(frozen=True)
class Case:
    """Random weights and one random batch; a language model has a target for each token."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    generator: torch.Generator

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that require gradients."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def num_parameters(self) -> int:
        """P."""
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def classes_second(self) -> _ClassesSecond:
        """The model as nn.CrossEntropyLoss and the peers want it: tensors, classes on axis 1."""
        return _ClassesSecond(self.model)

    def rows(self, count: int) -> Tensor:
        """Return random vectors, (K, P)."""
        return torch.randn(count, self.num_parameters, generator=self.generator).to(self.inputs.device)


class _ClassesSecond(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.model(inputs)
        logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
        return logits.movedim(-1, 1)


def build_case(settings: DictConfig, generator: torch.Generator, device: torch.device) -> Case:
    """Return the model of a config in eval mode and a batch for it.

    Args:
        settings: `model`, `input_shape`, `num_outputs`, `batch_size`; `tokens: true` for language models.
        generator: of weights and data.
        device: where they go.
    """
    shape = tuple(settings.input_shape)
    model = build_model(
        partial(instantiate, settings.model),
        input_shape=shape,
        num_outputs=settings.num_outputs,
        generator=generator,
    )
    size, labels = (settings.batch_size, *shape), (settings.batch_size, *(shape if settings.tokens else ()))
    if settings.tokens:
        inputs = torch.randint(settings.num_outputs, size, generator=generator)
    else:
        inputs = torch.randn(size, generator=generator)
    targets = torch.randint(settings.num_outputs, labels, generator=generator)
    return Case(model.to(device).eval(), inputs.to(device), targets.to(device), generator)


def products(method: str, case: Case, count: int) -> Compute:
    """Return a function that does the work of a method once, set-up done."""
    return _METHODS[method](case, count)


def _forward(case: Case, count: int) -> Compute:
    model = case.classes_second

    def compute() -> Tensor:
        with torch.no_grad():
            return model(case.inputs)

    return compute


def _gradient(case: Case, count: int) -> Compute:
    model, loss = case.classes_second, nn.CrossEntropyLoss()
    return lambda: torch.autograd.grad(loss(model(case.inputs), case.targets), case.parameters)


def _curvlab(case: Case, count: int) -> Compute:
    op = GaussNewtonOperator(case.model, nn.CrossEntropyLoss(), (case.inputs, case.targets))
    vectors = case.rows(count).T
    return partial(op.matvec, vectors[:, 0]) if count == 1 else partial(op.matmat, vectors)


def _curvlinops(case: Case, count: int) -> Compute:
    try:
        from curvlinops import GGNLinearOperator
    except ImportError:
        raise NotInstalledError from None
    op = GGNLinearOperator(
        case.classes_second,
        nn.CrossEntropyLoss(),
        case.parameters,
        [(case.inputs, case.targets)],
        check_deterministic=False,
    )
    vectors = case.rows(count).T.contiguous()
    return partial(op.__matmul__, vectors[:, 0].clone() if count == 1 else vectors)


def _pyhessian(case: Case, count: int) -> Compute:
    try:
        from pyhessian import hessian
    except ImportError:
        raise NotInstalledError from None
    model, data = case.classes_second, [(case.inputs, case.targets)]
    computer = hessian(model, nn.CrossEntropyLoss(), dataloader=data, cuda=case.inputs.device.type == "cuda")
    sizes = [parameter.numel() for parameter in case.parameters]
    vectors = [
        [piece.view_as(p) for piece, p in zip(row.split(sizes), case.parameters, strict=True)]
        for row in case.rows(count)
    ]

    def compute() -> None:
        for vector in vectors:
            computer.dataloader_hv_product(vector)
            model.zero_grad(set_to_none=True)  # it leaves graphs in .grad

    return compute


_METHODS: dict[str, Callable[[Case, int], Compute]] = {
    "forward": _forward,
    "gradient": _gradient,
    "curvlab": _curvlab,
    "curvlinops": _curvlinops,
    "pyhessian": _pyhessian,
}
