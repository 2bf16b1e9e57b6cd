"""Spectral density by stochastic Lanczos quadrature."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from curvlab.checkpoint import Checkpoint, fingerprint
from curvlab.linalg import LinearOperator
from curvlab.shown import Shown, Summary, counted
from curvlab.spectrum.eigenvalues.lanczos import BlockLanczos


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
    checkpoint: str | Path | None = None,
    generator: torch.Generator | None = None,
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
        checkpoint: file in which finished probes and the basis of the one under way are kept, saved every minute:
            after a kill the same call goes on there and ends at the same numbers.
        generator: draws the starts; required with `checkpoint`.

    Cost: num_probes · num_steps products; memory of num_steps vectors.
    """
    if num_probes < 1 or num_steps < 1 or num_points < 2:
        raise ValueError(
            f"need num_probes, num_steps >= 1 and num_points >= 2, got {num_probes}, {num_steps}, {num_points}"
        )
    if width is not None and width <= 0:
        raise ValueError(f"width must be positive, got {width}")
    num_steps = min(num_steps, operator.shape[0])
    nodes = torch.empty(num_probes, num_steps, dtype=torch.float64)
    weights = torch.empty(num_probes, num_steps, dtype=torch.float64)
    num_matvecs, first, under_way, file = 0, 0, None, None
    if checkpoint is not None:
        file = _open(checkpoint, operator, f"{num_probes} {num_steps}", generator)
    if file is not None and (kept := file.load()) is not None:
        first, num_matvecs, under_way = kept["probe"], kept["num_matvecs"], kept["lanczos"]
        nodes[:first], weights[:first] = kept["nodes"], kept["weights"]
    for probe in range(first, num_probes):
        lanczos = BlockLanczos(operator, block_size=1, generator=generator)
        if under_way is not None:
            lanczos.restore(under_way)
            under_way = None
        for _ in range(lanczos.num_matvecs, num_steps):
            lanczos.step()
            if file is not None and file.due(num_matvecs + lanczos.num_matvecs):
                done = {"probe": probe, "num_matvecs": num_matvecs, "lanczos": lanczos.state()}
                file.save(done | {"nodes": nodes[:probe].clone(), "weights": weights[:probe].clone()})
        values, coefficients, _ = lanczos.ritz_pairs()
        nodes[probe], weights[probe] = values, coefficients[0] ** 2
        num_matvecs += lanczos.num_matvecs
    return _smoothed(nodes, weights, num_points=num_points, width=width, num_matvecs=num_matvecs)


def _open(path: str | Path, operator: LinearOperator, name: str, generator: torch.Generator | None) -> Checkpoint:
    if generator is None:
        raise ValueError("a checkpoint keeps the state of the generator: pass generator=...")
    return operator.checkpoint(path, {"density": name, "generator": fingerprint([generator.get_state()])})


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
