"""Tables of the five gaps: what tab4 and tab5 compute, for one curvature matrix or another."""

from __future__ import annotations

from typing import Any

import pandas as pd
from omegaconf import DictConfig

from curvlab.influence.retraining import GAPS
from curvlab.lab import Run, load_paper_numbers, t_interval, task_settings
from experiments.papers import FOLDER
from experiments.pbrf.decomposition import Decomposition
from experiments.pbrf.exact_influence import ExactDecomposition
from experiments.pbrf.networks import load_network

NORMS = ("per_example", "total")
MOVES = {"moved": None, "moved by PBRF": "proximal_bregman", "moved by linearised": "linearised"}


def gap_tables(run: Run, cfg: DictConfig, curvature: str, printed: str) -> dict[str, pd.DataFrame]:
    """Return `table`, `points` and `networks`, rows for tasks, for points and gaps, and for seeds.

    `points` has, beside the gaps, distances from θ^s: `moved`, of the influence estimate, `moved by PBRF` and
    `moved by linearised`, of these two responses; all per example and in total (see
    `curvlab.influence.retraining.Gap`).

    `networks` says what a row is worth: training loss, that of the best constant outputs, gradient norm at θ^s,
    test loss, and residual of the influence estimate, the largest of its points'. With the Hessian also what its
    inverse is worth: its smallest eigenvalue, how many lie below -λ, and min |μ + λ|.

    Columns of `table`: means over seeds of all of these, but the largest residual; `learned`, whether every
    seed's training loss is below the constant outputs'; of each gap the mean, a 95 % t interval over the seeds'
    means (`low`, `high`; nan for one seed), and `std` over the points of a seed, averaged over seeds; the paper's
    mean and what it prints behind ±, which it does not explain, for the row itself or for that which it stands
    in for.

    Args:
        run: seeds, store.
        cfg: `tasks`, and for all of them or for one `seeds`, `num_points` and what `load_network` takes.
        curvature: of the influence estimate: "gauss_newton" or "hessian".
        printed: the paper's table.
    """
    rows, points, networks = [], [], []
    for name, settings in task_settings(cfg).items():
        own, states = [], []
        for seed in settings.seeds:
            network = load_network(run, name, settings, seed)
            found = ExactDecomposition(network, settings.num_points)
            measured = found.gaps(curvature)
            for move, response in MOVES.items():
                measured[move] = found.moved(curvature) if response is None else found.moved_by(response)
            state = found.base_state()
            states.append(
                {
                    "task": network.label,
                    "seed": seed,
                    "learning rate": network.lr,
                    "train loss": state["train_loss"],
                    "constant loss": state["constant_loss"],
                    "gradient norm": state["gradient_norm"],
                    "test loss": state["test_loss"],
                    "residual": found.influence(curvature)[1],
                }
                | (_saddle(found) if curvature == "hessian" else {})
            )
            own += [
                {"task": network.label, "seed": seed, "point": int(point), "gap": gap}
                | {norm: float(values[k, i]) for i, norm in enumerate(NORMS)}
                for gap, values in measured.items()
                for k, point in enumerate(found.points)
            ]
        size = {"P": len(network.initial), "N": len(network.train[1]), "epochs": network.num_epochs}
        rows.append(_row(network.label, settings, size, pd.DataFrame(states), pd.DataFrame(own), printed))
        points += own
        networks += states
    found_networks = pd.DataFrame(networks)
    run.note(seeds=sorted(set(found_networks.seed.tolist())))
    return {"table": pd.DataFrame(rows), "points": pd.DataFrame(points), "networks": found_networks}


def by_point(points: pd.DataFrame, norm: str = "per_example") -> pd.DataFrame:
    """Return the gaps of one task as columns, a row for each seed and point."""
    return points.pivot_table(index=["seed", "point"], columns="gap", values=norm, sort=False)


def _saddle(found: Decomposition) -> dict[str, float]:
    spectrum = found.hessian_spectrum()
    return {
        "smallest eigenvalue": spectrum["smallest"],
        "eigenvalues below -λ": spectrum["num_below"],
        "min |μ + λ|": spectrum["nearest"],
    }


def _row(  # noqa: PLR0917
    label: str, settings: DictConfig, size: dict[str, int], states: pd.DataFrame, own: pd.DataFrame, printed: str
) -> dict[str, Any]:
    paper = load_paper_numbers("pbrf", folder=FOLDER)
    known = {number.row for number in paper.in_table(printed)}
    stands_for = settings.paper_row or settings.get("stands_for")
    row: dict[str, Any] = {"task": label, "paper's row": settings.paper_row or ""}
    row |= {"stands for": "" if settings.paper_row else stands_for or ""} | size
    row |= {
        "points": own.groupby("seed").point.nunique().max(),
        "seeds": own.seed.nunique(),
        "λ": settings.damping,
    }
    means = states.drop(columns=["task", "seed"]).mean(skipna=False)
    row |= {str(name): value for name, value in means.items()}
    row["residual"] = states.residual.max(skipna=False)
    row["learned"] = bool((states["train loss"] < states["constant loss"]).all())
    for move in MOVES:
        row[move] = own[own.gap == move].per_example.mean()
    for gap in GAPS:
        values = own[own.gap == gap].groupby("seed", sort=False)
        interval = t_interval(values.per_example.mean())
        row |= {f"{gap} per_example mean": values.per_example.mean().mean()}
        row |= {f"{gap} per_example low": interval.low, f"{gap} per_example high": interval.high}
        row |= {f"{gap} per_example std": values.per_example.std().mean()}
        row |= {f"{gap} total mean": values.total.mean().mean()}
        if stands_for in known:
            number = paper.get(printed, stands_for, gap)
            row |= {f"{gap} paper mean": number.value, f"{gap} paper ±": number.stderr}
    return row
