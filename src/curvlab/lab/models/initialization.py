"""Build models whose initial values come from a generator, not from the global random state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from curvlab.seeding import seeded_by


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
