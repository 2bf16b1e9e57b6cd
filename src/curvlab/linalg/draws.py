"""Examples drawn with given probabilities, and the factors that keep what is made of them unbiased."""

from __future__ import annotations

import torch
from torch import Tensor

from curvlab.arguments import tensor


class ExampleDraws:
    """Draws of examples, i with probability q_i, each multiplied by 1 / (N q_i).

    Args:
        probabilities: (N,), finite, not negative and not all 0; q is their share of the sum.
        num_examples: N.

    Attributes:
        probabilities: q, fp64 on the CPU.
    """

    def __init__(self, probabilities: Tensor, num_examples: int) -> None:
        given = tensor("probabilities", probabilities).detach().double().cpu()
        if given.shape != (num_examples,):
            raise ValueError(
                f"need one probability for each of {num_examples} examples, got shape {tuple(given.shape)}"
            )
        if not bool((given >= 0).all()) or not 0 < float(given.sum()) < torch.inf:
            raise ValueError("probabilities must be finite, not negative, and not all 0")
        self.probabilities = given / given.sum()
        self._cumulative = self.probabilities.cumsum(0)

    def draw(self, batch_size: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return the places of `batch_size` examples drawn with replacement, and 1 / (N q_i) of each."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        source = generator.device if generator is not None else torch.device("cpu")
        uniform = torch.rand(batch_size, generator=generator, dtype=torch.float64, device=source).cpu()
        # By the inverse of the distribution function: torch.multinomial refuses more than 2^24 examples.
        places = torch.searchsorted(self._cumulative, uniform * self._cumulative[-1], right=True)
        drawn = places.clamp(max=len(self._cumulative) - 1)
        return drawn, 1 / (len(self.probabilities) * self.probabilities[drawn])
