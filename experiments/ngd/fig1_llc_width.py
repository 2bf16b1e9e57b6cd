"""LLC of networks trained by NGD and by SGD, over widths and depths (Saghir et al. 2024, Fig. 1).

make ngd-fig1 PRESET=smoke|embedded|laptop|paper ARGS="data=fashion_mnist seeds=[0,1,2]"

Both optimizers start from the same weights and see the same batches for as many epochs. An LLC is given only where
training has converged (training loss below `converged_below`) and the estimate is valid: chains mixed, loss not
below the start; the others stand in the table with the reason. The t-tests are Welch's, over seeds. The paper's
"t-value of 1.9^-31" is a p-value of 1.9e-31. NGD as in ngd-fig2.

The paper compares at one learning rate. For the models of `fair.models` the second figure asks how the answer
depends on that: each optimizer at the learning rate of its smallest validation loss, chosen from one grid with
equal seeds and epochs (tuning.csv, tuned.csv), and both at equal training loss, interpolated between checkpoints
(equal.csv, matched.csv). settings.csv puts them beside the paper's setting, for the LLC and for tr(H), the other
quantity of ngd-fig2.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from curvlab import runs
from curvlab.reporting import save_claims
from experiments.ngd.fig1_claims import judge_claims, summary_table
from experiments.ngd.fig1_fair import FairComparison, compare_fairly
from experiments.ngd.fig1_fair_claims import judge_fair
from experiments.ngd.fig1_fair_plot import draw_fair
from experiments.ngd.fig1_plot import draw
from experiments.ngd.trajectories import final_estimate, load_problem


@runs.main("ngd/fig1_llc_width")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, judge, draw."""
    with runs.start(cfg, paper="ngd", item="fig1", title="LLC of NGD and SGD over widths") as run:
        compared = _compared(cfg)
        parts = [_model_rows(run, cfg, model, place) for model, place in _models(cfg)]
        table = pd.read_csv(run.save_table(pd.concat(parts, ignore_index=True)))
        summary = summary_table(table)
        run.save_table(summary, "summary.csv")
        fair = compare_fairly(run, cfg, compared)
        settings = pd.read_csv(run.save_table(fair.settings(), "settings.csv"))
        claims = judge_claims(table, summary, claimed=cfg.claimed, settings=settings)
        save_claims(run.folder, [*claims, *judge_fair(fair)])
        run.save_figure(draw(table, summary))
        run.save_figure(draw_fair(fair.tuning, fair.equal, settings), "figure_fair.png")
        run.note(scale=_scale(cfg, fair), seeds=list(cfg.seeds))


def _models(cfg: DictConfig) -> list[tuple[DictConfig, dict[str, Any]]]:
    """Return each model's node with its place in the table: panel and width."""
    models = []
    for depth in cfg.depths:
        for width in cfg.widths:
            node = {
                "_target_": "curvlab.models.MLP",
                "hidden_sizes": [width] * depth,
                "activation": cfg.activation,
            }
            panel = f"{depth} hidden layer{'s' if depth > 1 else ''}"
            models.append((OmegaConf.create(node), {"panel": panel, "width": width}))
    if cfg.lenet is not None:
        models.append((cfg.lenet, {"panel": "LeNet-5", "width": 0}))
    return models


def _compared(cfg: DictConfig) -> list[tuple[DictConfig, str]]:
    """Return the models of `fair.models`, by name."""
    known = {_name(place): model for model, place in _models(cfg)}
    if missing := [name for name in cfg.fair.models if name not in known]:
        raise ValueError(f"fair.models has {missing}, not among the models: choose of {list(known)}")
    return [(known[name], name) for name in cfg.fair.models]


def _name(place: dict[str, Any]) -> str:
    return f"{place['panel']}, width {place['width']}"


def _model_rows(run: runs.Run, cfg: DictConfig, model: DictConfig, place: dict[str, Any]) -> pd.DataFrame:
    problem = load_problem(run, cfg.data, model, _name(place))
    parts = [
        final_estimate(run, problem, optimizer, cfg, seed).assign(optimizer=str(label), seed=seed, **place)
        for label, optimizer in cfg.optimizers.items()
        for seed in cfg.seeds
    ]
    rows = pd.concat(parts, ignore_index=True)
    columns = ["panel", "width", "optimizer", "seed", "train_loss", "validation_loss", "converged", "valid", "llc"]
    return rows[columns + [column for column in rows if column not in columns]]


def _scale(cfg: DictConfig, fair: FairComparison) -> dict[str, object]:
    """Return what was reduced or changed, ours beside the paper's."""
    chosen = fair.tuning[fair.tuning.chosen].drop_duplicates(["model", "optimizer"])
    choice = "; ".join(f"{row.model}: {row.optimizer} {row.lr:g}" for row in chosen.itertuples())
    return {
        "training examples": {"ours": cfg.data.num_train or "all", "paper": "60000, not stated"},
        "widths": {"ours": list(cfg.widths), "paper": "a range, in the figure"},
        "seeds": {"ours": len(cfg.seeds), "paper": "not stated"},
        "epochs": {"ours": cfg.training.num_epochs, "paper": "not stated"},
        "learning rate": {"ours": cfg.optimizers[cfg.claimed].lr, "paper": 0.01},
        "alpha": {"ours": cfg.optimizers[cfg.claimed].alpha, "paper": 0.01},
        "batch size": {"ours": cfg.training.batch_size, "paper": 128},
        "tuning of the first figure": {"ours": "none; both at one learning rate", "paper": "none stated"},
        "tuning of the second": {
            "ours": f"both over {list(cfg.fair.lrs)}, {len(cfg.fair.seeds)} seeds each; chosen: {choice}",
            "paper": "no such comparison",
        },
        "settings tried before": {"ours": cfg.settings_tried, "paper": "not stated"},
    }


if __name__ == "__main__":
    main()
