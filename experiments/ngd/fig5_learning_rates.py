"""One state, then NGD at several learning rates (Saghir et al. 2024, Fig. 5).

make ngd-fig5 PRESET=smoke|embedded|laptop|paper ARGS="branches.ngd-high.lr=0.3"

SGD trains to the split; from there it goes on at its learning rate, beside NGD at one, ten and a hundred times
that rate. The claims are judged on Kaldi's NGD with rescaled output (`ngd-low`, `-middle`, `-high`); the same
without rescaling stands beside it, and on a small net Eqs. 6 and 7 literally (`exact-ngd-...`). See `fig4_split`
for what is measured, and `ngd-fig6` for SGD at the raised rate, which the comparison here lacks.
"""

from __future__ import annotations

import pandas as pd
from omegaconf import DictConfig

from curvlab import runs
from curvlab.reporting import save_claims
from experiments.ngd.fig5_claims import judge_claims
from experiments.ngd.split import scale, split_table
from experiments.ngd.split_measures import SplitResults
from experiments.ngd.split_plot import draw

LEARNING_RATES = "SGD 1e-4; NGD 1e-4, 1e-3, 1e-2"


@runs.main("ngd/fig5_learning_rates")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, judge, draw."""
    with runs.start(cfg, paper="ngd", item="fig5", title="One state, then NGD at several learning rates") as run:
        found = SplitResults.of(pd.read_csv(run.save_table(split_table(run, cfg))))
        run.save_table(found.summary, "summary.csv")
        claimed = {str(panel): list(branches) for panel, branches in cfg.claimed.items()}
        save_claims(run.folder, judge_claims(found, claimed=claimed))
        run.save_figure(draw(found.table))
        run.note(scale=scale(cfg, data="MNIST", learning_rates=LEARNING_RATES), seeds=list(cfg.seeds))


if __name__ == "__main__":
    main()
