"""One state, then SGD at a raised learning rate (Saghir et al. 2024, Fig. 6).

make ngd-fig6 PRESET=smoke|embedded|laptop|paper ARGS="branches.sgd-raised.lr=0.1"

SGD trains to the split; then its learning rate is raised a hundredfold (`sgd-raised`), beside NGD at the old one.
Is it the larger step that raises the LLC, or NGD? The paper leaves out the pair that would tell: NGD at the raised
rate (`ngd-raised`, our addition), which is in summary.csv and the figure, in no claim. The update size ‖∇L‖ does
not contain the learning rate, so the claim on the step is judged on ‖Δw‖. See `fig4_split` for what is measured,
and for the readings of NGD.
"""

from __future__ import annotations

import pandas as pd
from omegaconf import DictConfig

from curvlab import runs
from curvlab.reporting import save_claims
from experiments.ngd.fig6_claims import judge_claims
from experiments.ngd.split import scale, split_table
from experiments.ngd.split_measures import SplitResults
from experiments.ngd.split_plot import draw

LEARNING_RATES = "SGD 1e-4, then 1e-2; NGD 1e-4"


@runs.main("ngd/fig6_raised_sgd")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, judge, draw."""
    with runs.start(cfg, paper="ngd", item="fig6", title="One state, then SGD at a raised learning rate") as run:
        found = SplitResults.of(pd.read_csv(run.save_table(split_table(run, cfg))))
        run.save_table(found.summary, "summary.csv")
        save_claims(run.folder, judge_claims(found, claimed=dict(cfg.claimed)))
        run.save_figure(draw(found.table))
        run.note(scale=scale(cfg, data="not stated", learning_rates=LEARNING_RATES), seeds=list(cfg.seeds))


if __name__ == "__main__":
    main()
