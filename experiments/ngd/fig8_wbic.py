"""WBIC of NGD against the validation loss while it overfits (Saghir et al. 2024, Fig. 8).

make ngd-fig8 PRESET=smoke|embedded|laptop|paper ARGS="label_noise=0.2"

The same networks and estimates as ngd-fig7's, from the store where they have been computed. WBIC = n E[L(w)] at
inverse temperature n/ln n, that is n L(w*) + LLC ln n: the figure shows both terms, because overfitting lowers the
first while it raises the second, and which of the two wins is what the paper's claim comes to.
"""

from __future__ import annotations

import pandas as pd
from omegaconf import DictConfig

from curvlab import runs
from curvlab.reporting import save_claims
from experiments.ngd.fig8_plot import draw
from experiments.ngd.overfitting import overfitting_table, scale, since_minimum
from experiments.ngd.overfitting_claims import judge_fig8


@runs.main("ngd/fig8_wbic")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, judge, draw."""
    with runs.start(cfg, paper="ngd", item="fig8", title="WBIC while overfitting") as run:
        table = pd.read_csv(run.save_table(overfitting_table(run, cfg)))
        since = pd.read_csv(run.save_table(since_minimum(table), "summary.csv"))
        save_claims(run.folder, judge_fig8(since, table))
        run.save_figure(draw(table))
        run.note(scale=scale(cfg, int(table.num_train.iloc[0])), seeds=list(cfg.seeds))


if __name__ == "__main__":
    main()
