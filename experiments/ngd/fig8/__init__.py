"""WBIC of NGD against the validation loss while it overfits (Saghir et al. 2024, Fig. 8).

make ngd-fig8 PRESET=smoke|embedded|laptop|paper ARGS="label_noise=0.2"

The same networks and estimates as ngd-fig7's, from the store where they have been computed. WBIC = n E[L(w)] at
inverse temperature n/ln n, that is n L(w*) + LLC ln n, w* being the minimum near the weights: the figure shows
both terms, because overfitting lowers the first while it raises the second, and which of the two wins is what the
paper's claim comes to.
"""

from curvlab.lab import Target
from experiments.ngd.overfitting.paper import PAPER

TARGET = Target(
    __name__,
    title="WBIC while overfitting",
    paper=PAPER,
    compute="experiments.ngd.overfitting.compute:compute",
    after=("ngd/fig7",),
)
