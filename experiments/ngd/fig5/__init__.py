"""One state, then NGD at several learning rates (Saghir et al. 2024, Fig. 5).

make ngd-fig5 PRESET=smoke|embedded|laptop|paper ARGS="branches.ngd-high.lr=0.3"

SGD trains to the split; from there it goes on at its learning rate, beside NGD at one, ten and a hundred times
that rate. The claims are judged on Kaldi's NGD with rescaled output (`ngd-low`, `-middle`, `-high`); the same
without rescaling stands beside it, and on a small net Eqs. 6 and 7 literally (`exact-ngd-...`). See ngd-fig4 for
what is measured, and ngd-fig6 for SGD at the raised rate, which the comparison here lacks.
"""

from curvlab.lab import Target
from experiments.ngd.branching.paper import PAPER

TARGET = Target(
    __name__,
    title="One state, then NGD at several learning rates",
    paper=PAPER | {"data._target_": "MNIST", "branches.*.lr": "SGD 1e-4; NGD 1e-4, 1e-3, 1e-2"},
    compute="experiments.ngd.branching.compute:compute",
    draw="experiments.ngd.branching.plot:draw",
)
