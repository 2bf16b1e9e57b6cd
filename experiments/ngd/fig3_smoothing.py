"""Smoothing constants alpha and epsilon of NGD against its LLC (Saghir et al. 2024, Fig. 3).

make ngd-fig3 PRESET=smoke|embedded|laptop|paper ARGS="data=fashion_mnist alphas=[0.01,1]"

Every network of a seed starts from the same weights and sees the same batches; SGD, which NGD becomes for
alpha -> ∞ (at this lr, see curvlab.optim.NGD), is the band in both panels. One constant is varied at a time, the
other stands as in `ngd`; the paper says for neither panel what it was. epsilon is a floor of the eigenvalues of
each axis's estimate, an element's squared gradient, so it matters from there on; alpha multiplies it. An LLC is
given only where training has converged and the estimate is valid, as in ngd-fig1; the others are drawn hollow and
count in no claim.
"""

from __future__ import annotations

import pandas as pd
from omegaconf import DictConfig

from curvlab import runs
from curvlab.reporting import save_claims
from experiments.ngd.fig3_claims import judge_claims, summary_table, trend_table
from experiments.ngd.fig3_plot import draw
from experiments.ngd.trajectories import final_estimate, load_problem


@runs.main("ngd/fig3_smoothing")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, judge, draw."""
    with runs.start(cfg, paper="ngd", item="fig3", title="Smoothing of the Fisher matrix against the LLC") as run:
        table = pd.read_csv(run.save_table(_table(run, cfg)))
        run.save_table(summary_table(table), "summary.csv")
        trends = pd.read_csv(run.save_table(trend_table(table), "trends.csv"))
        save_claims(run.folder, judge_claims(table, trends))
        run.save_figure(draw(table))
        run.note(scale=_scale(cfg), seeds=list(cfg.seeds))


def _table(run: runs.Run, cfg: DictConfig) -> pd.DataFrame:
    """Return one row a sweep (sgd, alpha, epsilon), value and seed."""
    problem = load_problem(run, cfg.data, cfg.model, "smoothing")
    cells = [("sgd", float("nan"), {**cfg.sgd})]
    cells += [("alpha", alpha, {**cfg.ngd, "alpha": alpha}) for alpha in cfg.alphas]
    cells += [("epsilon", epsilon, {**cfg.ngd, "epsilon": epsilon}) for epsilon in cfg.epsilons]
    parts = [
        final_estimate(run, problem, optimizer, cfg, seed).assign(sweep=sweep, value=value, seed=seed)
        for sweep, value, optimizer in cells
        for seed in cfg.seeds
    ]
    table = pd.concat(parts, ignore_index=True)
    columns = ["sweep", "value", "seed", "train_loss", "validation_loss", "converged", "valid", "llc"]
    return table[columns + [column for column in table if column not in columns]]


def _scale(cfg: DictConfig) -> dict[str, object]:
    """Return what was reduced or changed, ours beside the paper's."""
    return {
        "training examples": {"ours": cfg.data.num_train or "all", "paper": "not stated"},
        "model": {"ours": f"FFNN {list(cfg.model.hidden_sizes)}", "paper": "not stated"},
        "seeds": {"ours": len(cfg.seeds), "paper": "not stated"},
        "epochs": {"ours": cfg.training.num_epochs, "paper": "not stated"},
        "learning rate": {"ours": cfg.ngd.lr, "paper": "not stated; 0.01 elsewhere"},
        "alpha in the sweep of epsilon": {"ours": cfg.ngd.alpha, "paper": "not stated"},
        "epsilon in the sweep of alpha": {"ours": cfg.ngd.epsilon, "paper": "not stated; 1e-10 elsewhere"},
    }


if __name__ == "__main__":
    main()
