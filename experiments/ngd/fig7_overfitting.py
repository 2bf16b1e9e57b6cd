"""LLC and tr(H) of SGD and NGD while they overfit (Saghir et al. 2024, Fig. 7).

make ngd-fig7 PRESET=smoke|embedded|laptop|paper ARGS="label_noise=0.2"

Trained until the validation loss has long passed its minimum; what happens from there on is judged. The estimates
of early checkpoints are often no LLC, since training has not converged and the chains go below the start: they
are drawn hollow and count in no claim; the paper counts every estimate. Data and labels: `overfitting`.
"""

from __future__ import annotations

import pandas as pd
from omegaconf import DictConfig

from curvlab import runs
from curvlab.reporting import save_claims
from experiments.ngd.fig7_plot import draw
from experiments.ngd.overfitting import overfitting_table, scale, since_minimum
from experiments.ngd.overfitting_claims import judge_fig7


@runs.main("ngd/fig7_overfitting")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, judge, draw."""
    with runs.start(cfg, paper="ngd", item="fig7", title="LLC and Hessian trace while overfitting") as run:
        table = pd.read_csv(run.save_table(overfitting_table(run, cfg)))
        since = pd.read_csv(run.save_table(since_minimum(table), "summary.csv"))
        save_claims(run.folder, judge_fig7(since))
        run.save_figure(draw(table))
        run.note(scale=scale(cfg, int(table.num_train.iloc[0])), seeds=list(cfg.seeds))


if __name__ == "__main__":
    main()
