"""Spectral density by stochastic Lanczos quadrature."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlab.arguments import positive, whole
from curvlab.iterate import Checkpoint, iterate
from curvlab.linalg import LinearOperator, generator_for
from curvlab.seeding import Seed
from curvlab.shown import Shown, Summary, counted
from curvlab.spectrum.eigenvalues import BlockLanczos


@dataclass(frozen=True, repr=False)
class SpectralDensity(Shown):
    """Density of the eigenvalues, smoothed; it integrates to 1.

    Attributes:
        grid: (G,), eigenvalues at which it is given, fp64 on the CPU.
        density: (G,), 1/P sum_i N(grid; λ_i, width²).
        stderr: (G,), over independent probes; nan for one.
        nodes: (n, m), Ritz values of each probe: quadrature nodes.
        weights: (n, m), their weights, each row with sum 1: mean_j f(nodes) weights estimates tr f(A) / P.
        width: of the smoothing.
        num_matvecs: products paid for.
    """

    grid: Tensor
    density: Tensor
    stderr: Tensor
    nodes: Tensor
    weights: Tensor
    width: float
    num_matvecs: int

    def summary(self) -> Summary:
        """Return the range, the smoothing and the cost."""
        return Summary(
            "density of eigenvalues",
            f"from {float(self.grid[0]):.4g} to {float(self.grid[-1]):.4g}",
            f"smoothed over {self.width:.2g}, {counted(len(self.nodes), 'probe')}",
            (counted(self.num_matvecs, "product"),),
        )


def spectral_density(
    operator: LinearOperator,
    *,
    num_probes: int = 10,
    num_steps: int = 80,
    num_points: int = 1000,
    width: float | None = None,
    progress: bool = True,
    callback: Callable[[DensityState], object] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    generator: Seed = None,
) -> SpectralDensity:
    """Estimate the density of A's eigenvalues (Ubaru, Chen & Saad 2017; Ghorbani, Krishnan & Xiao 2019).

    Each probe runs Lanczos from a random normal start; Ritz values and squared first components of the
    eigenvectors of T are a Gauss quadrature for its spectral measure.

    Args:
        operator: A, (P, P).
        num_probes: independent starts.
        num_steps: Lanczos steps a probe: resolution; exact for polynomials of degree 2 num_steps - 1.
        num_points: of the grid, from below the smallest to above the largest Ritz value.
        width: standard deviation of the Gaussian put on each node; a hundredth of the range by default.
        progress: show a bar.
        callback: called with the state after each step, a product.
        checkpoint: file of unfinished work, see `curvlab.iterate.iterate`.
        generator: draws the starts; required with `checkpoint`.

    Cost: num_probes · num_steps products; memory of num_steps vectors.
    """
    generator = generator_for(operator, generator)
    whole("num_probes", num_probes)
    whole("num_steps", num_steps)
    whole("num_points", num_points, least=2)
    if width is not None:
        positive("width", width)
    work = _Quadrature(operator, num_probes, min(num_steps, operator.shape[0]), generator)
    total = num_probes * work.num_steps
    nodes, weights = iterate(
        work, name="density", total=total, progress=progress, callback=callback, checkpoint=checkpoint
    )
    return _smoothed(nodes, weights, num_points=num_points, width=width, num_matvecs=total)


@dataclass
class DensityState:
    """How far a quadrature is.

    Attributes:
        nodes: (m,) of each finished probe.
        weights: likewise.
        lanczos: the basis of the probe at work.
        generator: draws the starts.
        num_steps: products so far.
    """

    nodes: list[Tensor]
    weights: list[Tensor]
    lanczos: BlockLanczos
    generator: torch.Generator | None
    num_steps: int = 0
    done: bool = False


@dataclass(frozen=True)
class _Quadrature:
    operator: LinearOperator
    num_probes: int
    num_steps: int
    generator: torch.Generator | None

    def depends_on(self) -> Mapping[str, Any]:
        settings = (self.num_probes, self.num_steps)
        return {"operator": self.operator, "generator": self.generator, "settings": settings}

    def init(self) -> DensityState:
        return DensityState([], [], self._begin(self.generator), self.generator)

    def step(self, state: DensityState) -> DensityState:
        state.lanczos.step()
        state.num_steps += 1
        if state.lanczos.num_matvecs == self.num_steps:
            values, coefficients, _ = state.lanczos.ritz_pairs()
            state.nodes.append(values)
            state.weights.append(coefficients[0] ** 2)
            state.done = len(state.nodes) == self.num_probes
            if not state.done:
                state.lanczos = self._begin(state.generator)
        return state

    def result(self, state: DensityState) -> tuple[Tensor, Tensor]:
        return torch.stack(state.nodes), torch.stack(state.weights)

    def _begin(self, generator: torch.Generator | None) -> BlockLanczos:
        return BlockLanczos(self.operator, block_size=1, generator=generator)


def _smoothed(
    nodes: Tensor, weights: Tensor, *, num_points: int, width: float | None, num_matvecs: int
) -> SpectralDensity:
    """Put a Gaussian on each node, and take means over probes."""
    spread = float(nodes.max() - nodes.min())
    if width is None:
        width = spread / 100 or max(float(nodes.abs().max()), 1.0) / 100
    grid = torch.linspace(
        float(nodes.min()) - 4 * width, float(nodes.max()) + 4 * width, num_points, dtype=torch.float64
    )
    bumps = torch.exp(-(((grid[:, None, None] - nodes) / width) ** 2) / 2) / (width * math.sqrt(2 * math.pi))
    per_probe = (bumps * weights).sum(-1)  # (G, n)
    stderr = per_probe.std(dim=1) / math.sqrt(len(nodes)) if len(nodes) > 1 else torch.full_like(grid, math.nan)
    return SpectralDensity(grid, per_probe.mean(1), stderr, nodes, weights, width, num_matvecs)
