"""One state, then SGD and NGD: update size and LLC after the split (Saghir et al. 2024, Fig. 4).

make ngd-fig4 PRESET=smoke|embedded|laptop|paper ARGS="branches.ngd.alpha=4 seeds=[0,1,2,3,4]"

SGD trains to the split; from there it goes on, beside NGD at the same learning rate. The paper's update size is
‖∇L‖ for SGD and ‖F_s⁻¹∇L‖ for NGD, ours is ‖Δw‖/lr, which is the same. The claims are judged on Kaldi's NGD with
its output rescaled to the gradient's norm (`ngd`, as in all targets), whose update size is ‖∇L‖ by construction.
Beside it stand the same without rescaling (`ngd-unrescaled`), which only shrinks the gradient, and on a small net
Eqs. 6 and 7 literally, with the full Fisher matrix of each batch (`exact-ngd`), where nothing bounds the size.
Branches see the same batches. An estimate counts as an LLC only where the chains have mixed and stayed above the
minimum near the weights (`valid`), from which it is measured: the split is no minimum, and from the weights, as in
the paper (`llc_raw`), the estimate lacks what the loss can still fall (`descent`).
"""

from curvlab.lab import Target
from experiments.ngd.branching.paper import PAPER

TARGET = Target(
    __name__,
    title="One state, then SGD and NGD: update size and LLC",
    paper=PAPER
    | {"data._target_": "FashionMNIST", "before.optimizer.lr": 0.01, "branches.*.lr": "SGD 0.01, NGD 0.01"},
    compute="experiments.ngd.branching.compute:compute",
    draw="experiments.ngd.branching.plot:draw",
)
