"""Tables of the five gaps: what tab4 and tab5 compute, for one curvature matrix or another."""

from __future__ import annotations

from typing import Any

import pandas as pd
from omegaconf import DictConfig

from curvlab.influence.responses import GAPS
from curvlab.reporting import load_paper_numbers
from curvlab.runs import Run
from experiments.papers import FOLDER
from experiments.pbrf.decomposition import Decomposition
from experiments.pbrf.networks import load_network
from experiments.target import task_settings

NORMS = ("per_example", "total")


def gap_tables(run: Run, cfg: DictConfig, curvature: str, printed: str) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each task, and `points`, one for each task, seed, point and gap.

    Columns of `table`: the gaps' mean and standard deviation over points and seeds, per example and in total (see
    `curvlab.influence.responses.Gap`), the paper's, and what they are worth: training loss, gradient norm at θ^s,
    test loss, residual of the influence estimate (means over seeds), and `moved`, the mean distance per example
    from θ^s to the influence estimate.

    Args:
        run: seeds, store.
        cfg: `tasks`, and for all of them or for one `seeds`, `num_points` and what `load_network` takes.
        curvature: of the influence estimate: "gauss_newton" or "hessian".
        printed: the paper's table.
    """
    rows, points, seeds = [], [], set()
    for name, settings in task_settings(cfg).items():
        states, own = [], []
        for seed in settings.seeds:
            network = load_network(run, name, settings, seed)
            found = Decomposition(network, settings.num_points)
            gaps = found.gaps(curvature)
            states.append(found.base_state() | {"lr": network.lr, "residual": found.influence(curvature)[1]})
            gaps["moved"] = found.moved(curvature)
            own += [
                {"task": network.label, "seed": seed, "point": int(point), "gap": gap}
                | {norm: float(values[k, i]) for i, norm in enumerate(NORMS)}
                for gap, values in gaps.items()
                for k, point in enumerate(found.points)
            ]
            seeds.add(seed)
        size = {"P": len(network.initial), "N": len(network.train[1]), "epochs": network.num_epochs}
        rows.append(_row(network.label, settings, size, pd.DataFrame(states).mean(), pd.DataFrame(own), printed))
        points += own
    run.note(seeds=sorted(seeds))
    return {"table": pd.DataFrame(rows), "points": pd.DataFrame(points)}


def by_point(points: pd.DataFrame, norm: str = "per_example") -> pd.DataFrame:
    """Return the gaps of one task as columns, a row for each seed and point."""
    return points.pivot_table(index=["seed", "point"], columns="gap", values=norm, sort=False)


def _row(  # noqa: PLR0917
    label: str, settings: DictConfig, size: dict[str, int], state: pd.Series, own: pd.DataFrame, printed: str
) -> dict[str, Any]:
    row: dict[str, Any] = {"task": label, "paper's row": settings.paper_row or ""} | size
    row |= {"points": own.point.nunique(), "seeds": own.seed.nunique()}
    row |= {
        "learning rate": state.lr,
        "train loss": state.train_loss,
        "gradient norm": state.gradient_norm,
        "test loss": state.test_loss,
        "residual": state.residual,
    }
    row["moved"] = own[own.gap == "moved"].per_example.mean()
    paper = load_paper_numbers("pbrf", folder=FOLDER)
    known = {number.row for number in paper.in_table(printed)}
    for gap in GAPS:
        values = own[own.gap == gap]
        for norm in NORMS:
            row |= {f"{gap} {norm} mean": values[norm].mean(), f"{gap} {norm} std": values[norm].std()}
        if settings.paper_row in known:
            number = paper.get(printed, settings.paper_row, gap)
            row |= {f"{gap} paper mean": number.value, f"{gap} paper std": number.stderr}
    return row
