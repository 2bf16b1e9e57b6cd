"""Build models whose initial values come from a generator, not from the global random state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


def build_model(
    factory: Callable[..., nn.Module],
    *,
    input_shape: Sequence[int],
    num_outputs: int,
    generator: torch.Generator,
) -> nn.Module:
    """Return `factory(input_shape=..., num_outputs=...)` on the CPU, in eval mode.

    Random initial values follow from `generator` alone; pretrained ones are what they are.

    Args:
        factory: a model class or function of this package, or, for a Hydra node,
            `functools.partial(hydra.utils.instantiate, cfg.model)`.
        input_shape: of one input, from `DataSplits`.
        num_outputs: likewise.
        generator: drawn from once.
    """
    with seeded_by(generator):
        model = factory(input_shape=tuple(input_shape), num_outputs=num_outputs)
    return model.eval()


@contextmanager
def seeded_by(generator: torch.Generator, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed the global random state of the CPU and `device` from one draw, and put it back at the end.

    For code of others that draws from the global state and takes no generator: initialisation, dropout.
    """
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    device = torch.device(device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed every GPU as well
        if devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
