"""One state, then SGD at a raised learning rate (Saghir et al. 2024, Fig. 6).

make ngd-fig6 PRESET=smoke|embedded|laptop|paper ARGS="branches.sgd-raised.lr=0.1"

SGD trains to the split; then its learning rate is raised a hundredfold (`sgd-raised`), beside NGD at the old one.
Is it the larger step that raises the LLC, or NGD? The paper leaves out the pair that would tell: NGD at the raised
rate (`ngd-raised`, our addition), which is in summary.csv and the figure, in no claim. The update size ‖∇L‖ does
not contain the learning rate, so the claim on the step is judged on ‖Δw‖. See ngd-fig4 for what is measured, and
for the readings of NGD.
"""

from curvlab.lab import Target
from experiments.ngd.branching.paper import PAPER

TARGET = Target(
    __name__,
    title="One state, then SGD at a raised learning rate",
    paper=PAPER | {"branches.*.lr": "SGD 1e-4, then 1e-2; NGD 1e-4"},
    compute="experiments.ngd.branching.compute:compute",
    draw="experiments.ngd.branching.plot:draw",
    after=("ngd/fig5",),
)
