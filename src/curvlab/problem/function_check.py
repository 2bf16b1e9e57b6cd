"""What makes a module a function of single examples: no chance, no other examples, no state of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm


def check_mode(model: nn.Module) -> None:
    """Raise a ValueError at modules that are known to depend on chance or on a batch's other examples.

    What hides inside a forward (functional dropout, power iterations) is noticed by `deterministic` when it runs.
    """
    for module in model.modules():
        if isinstance(module, _DropoutNd) and module.training and module.p > 0:
            _refuse(model, module, "makes the outputs depend on chance")
        # Without running statistics, batch norm uses those of the batch in eval mode too; instance norm is then
        # a function of single examples, and with them it updates them in train mode.
        elif isinstance(module, _NormBase) and (module.training or module.running_mean is None):
            if not isinstance(module, _InstanceNorm):
                _refuse(model, module, "makes the outputs depend on the whole batch")
            elif module.running_mean is not None:
                _refuse(model, module, "changes its running statistics at each call")


def _refuse(model: nn.Module, module: nn.Module, what: str) -> None:
    name = next(name for name, other in model.named_modules() if other is module)
    raise ValueError(
        f"module '{name}' ({type(module).__name__}) {what}: call model.eval() first, so that the curvature is "
        "that of a function of single examples."
    )


@contextmanager
def deterministic(model: nn.Module, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Raise a ValueError if the model's forward, called inside, draws random numbers or changes a buffer.

    Yields copies of the buffers to call it with, in train mode (else nothing: in eval mode they are constants), so
    that the model and the global generator are as before even where it raises. Cost: microseconds.
    """
    training = any(module.training for module in model.modules())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()} if training else {}
    versions = {name: buffer._version for name, buffer in buffers.items() if not buffer.is_inference()}
    before = _random_state(device)
    yield buffers
    after = _random_state(device)
    mode = "train" if training else "eval"
    if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
        torch.set_rng_state(before[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(before[1], device)
        way_out = "call model.eval() first" if training else "its forward must not sample"
        raise ValueError(
            f"the model draws random numbers in {mode} mode, so its outputs depend on chance: {way_out}."
        )
    for name, version in versions.items():
        if buffers[name]._version != version:
            raise ValueError(
                f"the model changes its buffer '{name}' at each call in train mode, so it is no function of its "
                "parameters and one example: call model.eval() first."
            )


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


@contextmanager
def without_padding(model: nn.Module) -> Iterator[None]:
    """Set padding_idx of every nn.Embedding aside: it changes derivatives (in reverse mode only), not outputs."""
    padded = [
        (m, m.padding_idx) for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None
    ]
    for module, _ in padded:
        module.padding_idx = None
    try:
        yield
    finally:
        for module, index in padded:
            module.padding_idx = index
