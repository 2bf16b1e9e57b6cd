"""One state, then SGD and NGD: update size and LLC after the split (Saghir et al. 2024, Fig. 4).

make ngd-fig4 PRESET=smoke|embedded|laptop|paper ARGS="branches.ngd.alpha=4 seeds=[0,1,2,3,4]"

SGD trains to the split; from there it goes on, beside NGD at the same learning rate. The paper's update size is
‖∇L‖ for SGD and ‖F_s⁻¹∇L‖ for NGD, ours is ‖Δw‖/lr, which is the same. The claims are judged on Kaldi's NGD with
its output rescaled to the gradient's norm (`ngd`, as in all targets), whose update size is ‖∇L‖ by construction.
Beside it stand the same without rescaling (`ngd-unrescaled`), which only shrinks the gradient, and on a small net
Eqs. 6 and 7 literally, with the full Fisher matrix of each batch (`exact-ngd`), where nothing bounds the size.
Branches see the same batches. An estimate counts as an LLC only where the chains have mixed and stayed above the
start (`valid`); the split is no minimum, so the estimate there is that of a state on its way, as in the paper.
"""

from __future__ import annotations

import pandas as pd
from omegaconf import DictConfig

from curvlab import runs
from curvlab.reporting import save_claims
from experiments.ngd.fig4_claims import judge_claims
from experiments.ngd.split import scale, split_table
from experiments.ngd.split_measures import SplitResults
from experiments.ngd.split_plot import draw


@runs.main("ngd/fig4_split")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, judge, draw."""
    with runs.start(cfg, paper="ngd", item="fig4", title="One state, then SGD and NGD") as run:
        found = SplitResults.of(pd.read_csv(run.save_table(split_table(run, cfg))))
        run.save_table(found.summary, "summary.csv")
        save_claims(run.folder, judge_claims(found, claimed=dict(cfg.claimed)))
        run.save_figure(draw(found.table))
        run.note(scale=scale(cfg, data="FashionMNIST", learning_rates="SGD 0.01, NGD 0.01"), seeds=list(cfg.seeds))


if __name__ == "__main__":
    main()
