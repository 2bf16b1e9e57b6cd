"""Table 4, compute: gaps with influence estimates by the Hessian, and its solver error with either matrix."""

from __future__ import annotations

from typing import Any

import pandas as pd
from omegaconf import DictConfig

from curvlab.lab import Run, task_settings
from experiments.pbrf.decomposition import DENSE, Decomposition
from experiments.pbrf.exact_influence import ExactDecomposition
from experiments.pbrf.gap_tables import gap_tables
from experiments.pbrf.networks import load_network

CURVATURES = ("hessian", "gauss_newton")


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, `points` and `networks`, see `gap_tables`, and `curvatures`: solver errors, point by point.

    `curvatures` has the solver error by either matrix at the damping of the table and, for networks whose
    Hessian's eigenvalues are all known, at one that makes H + λI definite: 2 |μ_min|, in one digit. `moved` is
    how far the estimate by that matrix moves the outputs; `definite` tells the two dampings apart.
    """
    found = gap_tables(run, cfg, "hessian", "Table 4")
    curvatures: list[dict[str, Any]] = []
    for name, settings in task_settings(cfg).items():
        for seed in settings.seeds:
            network = load_network(run, name, settings, seed)
            decomposition = ExactDecomposition(network, settings.num_points)
            variations: list[tuple[bool, Decomposition]] = [(False, decomposition)]
            smallest = decomposition.hessian_spectrum()["smallest"]
            if len(network.initial) <= DENSE and smallest < 0:
                variations.append((True, decomposition.with_damping(float(f"{-2 * smallest:.0e}"))))
            for definite, variation in variations:
                for curvature in CURVATURES:
                    errors, moved = variation.solver_error(curvature), variation.moved(curvature)
                    place = {"task": network.label, "seed": seed, "curvature": curvature, "definite": definite}
                    place |= {"damping": variation.network.settings.damping}
                    place |= {"residual": variation.influence(curvature)[1]}
                    curvatures += [
                        place | {"point": int(point), "solver": float(error), "moved": float(move)}
                        for point, error, move in zip(variation.points, errors[:, 0], moved[:, 0], strict=True)
                    ]
    return found | {"curvatures": pd.DataFrame(curvatures)}
