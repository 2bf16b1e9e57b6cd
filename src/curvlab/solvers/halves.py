"""Means of iterates that tell how far they are from their limit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from curvlab.linalg import LinearOperator


class Halves:
    """Means of the iterates over both halves of the steps that are averaged."""

    def __init__(self, columns: Tensor, num_steps: int, num_averaged: int) -> None:
        self.start = num_steps - num_averaged
        self.middle = self.start + num_averaged // 2
        self.counts = (self.middle - self.start, num_steps - self.middle)
        self.sums = [torch.zeros_like(columns) for _ in range(2 if num_averaged else 0)]

    def add(self, u: Tensor, step: int) -> None:
        """Take the iterate of a step into account."""
        if self.sums and step > self.start:
            self.sums[step > self.middle] += u

    def mean(self) -> Tensor:
        """Return the mean over both."""
        return (self.sums[0] + self.sums[1]) / sum(self.counts)

    def error(self, operator: LinearOperator, rate: float) -> Tensor:
        """Return an estimate of the mean's relative error, (K,), from the distance between the halves.

        What remains of the start decays by at least q = exp(-rate · half) from one half to the next, so the mean
        is off by at most (1 + q) / (2 (1 - q)) of the distance; of noise it is about half, which is less.
        """
        decay = math.exp(-rate * self.counts[1])
        factor = (1 + decay) / (2 * max(1 - decay, 1e-12))
        distance = operator.norm(self.sums[0] / self.counts[0] - self.sums[1] / self.counts[1])
        norm = operator.norm(self.mean())
        return torch.where(norm > 0, factor * distance / norm, torch.zeros_like(norm))
