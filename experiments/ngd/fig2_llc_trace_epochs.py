"""LLC and tr(H) over epochs, NGD against SGD (Saghir et al. 2024, Fig. 2), and at matched training loss.

make ngd-fig2 PRESET=smoke|embedded|laptop|paper ARGS="data=fashion_mnist optimizers.ngd.alpha=4"

Both optimizers start from the same weights and see the same batches. NGD is Kaldi's online natural gradient with
its output rescaled to the gradient's norm, our reading of the paper's Eqs. 6 and 7 (see curvlab.optim.NGD). An
estimate counts as an LLC only where the chains have mixed and stayed above the start; the others are in the table,
marked. The paper compares at equal epochs; since the optimizers fit at different speed, the last panel and
matched.csv compare at equal training loss. tr(H) is the mean Hessian's over a fixed part of the training data.
"""

from __future__ import annotations

import pandas as pd
from omegaconf import DictConfig

from curvlab import runs
from curvlab.reporting import save_claims
from experiments.ngd.fig2_claims import judge_claims
from experiments.ngd.fig2_plot import draw
from experiments.ngd.matched_loss import matched_differences
from experiments.ngd.trajectories import load_problem, trajectory


@runs.main("ngd/fig2_llc_trace_epochs")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, judge, draw."""
    with runs.start(cfg, paper="ngd", item="fig2", title="LLC and Hessian trace over epochs") as run:
        parts = []
        for name, node in cfg.models.items():
            problem = load_problem(run, cfg.data, node, str(name))
            for label, optimizer in cfg.optimizers.items():
                for seed in cfg.seeds:
                    rows = trajectory(run, problem, optimizer, cfg, seed)
                    parts.append(rows.assign(model=str(name), optimizer=str(label), seed=seed))
        columns = ["model", "optimizer", "seed", "epoch"]
        table = pd.concat(parts, ignore_index=True)
        table = table[columns + [column for column in table if column not in columns]]
        # Read back what was written, six digits: everything below can be had from the file alone.
        table = pd.read_csv(run.save_table(table), keep_default_na=True)
        matched = matched_differences(table)
        run.save_table(matched, "matched.csv")
        save_claims(run.folder, judge_claims(table, matched))
        run.save_figure(draw(table))
        run.note(scale=_scale(cfg), seeds=list(cfg.seeds))


def _scale(cfg: DictConfig) -> dict[str, object]:
    """Return what was reduced or changed, ours beside the paper's."""
    return {
        "models": {"ours": ", ".join(cfg.models), "paper": "FFNN and LeNet-5"},
        "seeds": {"ours": len(cfg.seeds), "paper": "not stated"},
        "epochs": {"ours": cfg.training.num_epochs, "paper": "not stated"},
        "learning rate": {"ours": cfg.optimizers.ngd.lr, "paper": 0.01},
        "alpha": {"ours": cfg.optimizers.ngd.alpha, "paper": 0.1},
        "batch size": {"ours": cfg.training.batch_size, "paper": 128},
        "probes of the trace": {"ours": f"until 5 %, at most {cfg.trace.max_matvecs}", "paper": 10000},
        "tuning": {"ours": "none; both at one learning rate", "paper": "none stated"},
    }


if __name__ == "__main__":
    main()
