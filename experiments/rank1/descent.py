"""Runs of an optimizer on an objective: what it reached, step by step, at what cost, and K(ε) beside it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from torch.optim import Optimizer

from curvlab.lab import panels
from curvlab.linalg import flatten
from curvlab.optim import CubicNewton, UniformDirection, UniformDirectionInfo, stated_sigma
from experiments.rank1.objectives import Objective

# The method as its lemma has it, c = sigma_scale and δ / λ = delta_scale. The rules for α_k: given,
# sqrt(M ‖∇f‖ / 2) + c σ with the objective's global M and λ; measured, the same with both estimated along the path
# (c = 1); constant, c σ.
LEMMA: dict[str, Any] = {
    "rule": "given",
    "sigma_scale": 1.0,
    "delta_scale": 0.0,
    "num_directions": 1,
    "symmetrize": True,
    "safeguard": False,
}


@dataclass(frozen=True)
class Trace:
    """One run; entry k belongs to x_k, before step k.

    Attributes:
        gradient_norms: ‖∇f(x_k)‖; nan at the end of a run that diverged.
        values: f(x_k).
        points: x_k of each step for n = 1, else empty.
        num_products: Hessian products paid so far.
        directions: what the optimizer says of each step, uniform directions only.
        diverged: whether the run ended in a gradient or value that is not finite.
        seconds_per_step: mean wall time.
    """

    gradient_norms: list[float]
    values: list[float]
    points: list[float]
    num_products: list[int]
    directions: list[UniformDirectionInfo]
    diverged: bool
    seconds_per_step: float

    def steps_to(self, epsilon: float) -> int | None:
        """Return the first k >= 1 with ‖∇f(x_k)‖ <= ε, as the lemmas count; None when there is none."""
        reached = np.flatnonzero(np.array(self.gradient_norms[1:]) <= epsilon)
        return int(reached[0]) + 1 if len(reached) else None

    def logarithmic_steps(self, count: int) -> list[int]:
        """Return 0 and up to `count` steps about evenly spaced on a log scale, the last among them."""
        last = len(self.values) - 1
        steps = np.unique(np.geomspace(1, max(last, 1), count).round().astype(int))
        return [0, *(int(step) for step in steps if step <= last)]

    def rows(self, count: int, *, optimum: float) -> list[dict[str, Any]]:
        """Return step, gradient norm and f - f* at the logarithmic steps."""
        norms, values = self.gradient_norms, self.values
        return [
            {"step": step, "gradient_norm": norms[step], "gap": values[step] - optimum}
            for step in self.logarithmic_steps(count)
        ]

    def shares(self, spectral_norm: float) -> dict[str, float | None]:
        """Return the shares of steps that raise f or go uphill, and whose D or D + (δ + α_k) I is not PSD.

        Both mean the symmetric part. None where the optimizer forms no D.

        Args:
            spectral_norm: λ, which says what is rounding.
        """
        values, infos = np.array(self.values), self.directions
        rising = np.diff(values) > 1e-14 * abs(values[0])
        smallest = np.array([info.smallest_eigenvalue for info in infos])
        return {
            "share_rising": float(rising.mean()) if len(rising) else 0.0,
            "share_uphill": float(np.mean([info.slope > 0 for info in infos])) if infos else None,
            "share_indefinite": float((smallest < -1e-12 * spectral_norm).mean()) if infos else None,
            "share_singular": float((smallest + [info.shift for info in infos] <= 0).mean()) if infos else None,
        }


def descend(objective: Objective, optimizer: Optimizer, *, num_steps: int, stop_at: float = 0.0) -> Trace:
    """Take `num_steps` steps, fewer when the gradient norm reaches `stop_at` or the run diverges.

    A method that diverges has gradients or values that are not finite, or above 1e12 times the first ones.
    """
    norms: list[float] = []
    values: list[float] = []
    points: list[float] = []
    num_products: list[int] = []
    directions: list[UniformDirectionInfo] = []
    diverged, start = False, time.perf_counter()
    for step in range(num_steps + 1):
        values.append(float(objective.closure().detach()))
        norms.append(float(flatten(p.grad for p in objective.parameters if p.grad is not None).norm()))
        num_products.append(products(optimizer))
        if objective.size == 1:
            points.append(float(objective.parameters[0].detach()))
        diverged = not (norms[-1] < 1e12 * max(norms[0], 1e-12) and abs(values[-1]) < 1e100)
        if diverged:
            norms[-1] = math.nan  # where f overflows, its gradient may come out as 0
        if diverged or norms[-1] <= stop_at or step == num_steps:
            break
        try:
            optimizer.step(partial(float, values[-1]))  # the gradients are there already
        except torch.linalg.LinAlgError:  # D + shift I exactly singular
            diverged = True
            break
        if isinstance(optimizer, UniformDirection) and optimizer.last_step is not None:
            directions.append(optimizer.last_step)
    seconds = (time.perf_counter() - start) / max(len(values) - 1, 1)
    return Trace(norms, values, points, num_products, directions, diverged, seconds)


def make_optimizer(
    objective: Objective, method: str, settings: dict[str, Any], generator: torch.Generator
) -> Optimizer:
    """Return an optimizer by its name, with the objective's global constants unless its rule measures them.

    "uniform direction" takes what `LEMMA` has, "gradient descent" `lr_factor` in units of 1/λ, "Newton" and
    "cubic Newton" nothing.
    """
    spectral_norm, lipschitz = objective.spectral_norm, objective.hessian_lipschitz
    if spectral_norm is None or lipschitz is None:
        raise ValueError(f"{objective.name} has no known λ and M")
    if method == "gradient descent":
        return torch.optim.SGD(objective.parameters, lr=settings["lr_factor"] / spectral_norm)
    if method in ("Newton", "cubic Newton"):
        cubic = lipschitz if method == "cubic Newton" else 0.0
        return CubicNewton(objective.parameters, objective.hessian, hessian_lipschitz=cubic)
    own = dict(settings)
    scale, rule, delta = own.pop("sigma_scale"), own.pop("rule"), own.pop("delta_scale") * spectral_norm
    norms = {"spectral_norm": spectral_norm, "delta": delta, "num_directions": own["num_directions"]}
    sigma = scale * stated_sigma(objective.size, **norms)
    rules: dict[str, dict[str, Any]] = {
        "given": {"sigma": sigma, "hessian_lipschitz": lipschitz},
        "measured": {},
        "constant": {"alpha": sigma},
    }
    return UniformDirection(
        objective.parameters, objective.hessian, delta=delta, generator=generator, **own, **rules[rule]
    )


def products(optimizer: Optimizer) -> int:
    """Return the Hessian products that an optimizer has paid for."""
    if isinstance(optimizer, CubicNewton):
        return optimizer.num_matvecs
    last = getattr(optimizer, "last_step", None)
    return 0 if last is None else last.num_matvecs


def steps_panel(ax: Axes, rates: pd.DataFrame) -> None:
    """Draw K(ε) of the first seed, steps of all seeds, and how often ε was not reached; on log axes.

    Args:
        ax: labels its own axes; a legend of three entries is left to the caller.
        rates: rows of (seed, ε) with relative_epsilon, steps (nan: not reached), bound and steps_taken.
    """
    rates = rates.assign(inverse=1 / rates.relative_epsilon)
    first = rates[rates.seed == rates.seed.min()].sort_values("inverse")
    ax.plot(first.inverse, first.bound, color="black", label="K(ε), first seed")
    panels.scatter(ax, rates, x="inverse", y="steps", identity=False, label="steps taken, all seeds", size=16)
    panels.rule(ax, y=rates.steps_taken.max(), linestyle=":", label="length of the longest run")
    missing = int(rates.steps.isna().sum())
    # Below the panel: in it, the note would cover the line of the longest run.
    note = f"\n{missing} of {len(rates)} not reached" if missing else ""
    panels.frame(ax, x=f"‖∇f(x_0)‖ / ε{note}", y="steps", log="xy")
