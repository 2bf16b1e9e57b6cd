"""LLC and tr(H) of SGD and NGD while they overfit (Saghir et al. 2024, Fig. 7).

make ngd-fig7 PRESET=smoke|embedded|laptop|paper ARGS="label_noise=0.2"

Trained until the validation loss has long passed its minimum; what happens from there on is judged. The estimates
of early checkpoints are often no LLC, since training has not converged and the chains still move: they are drawn
hollow and count in no claim; the paper counts every estimate. The LLC is measured from the minimum near the
weights; the paper's, from the weights, is `llc_raw`, and lacks `descent`. Data and labels: `overfitting.compute`.
When training ends is ours to choose: last_epoch.csv has every change as it would be had it ended earlier, and
claims ask whether its sign depends on that. tr(H) takes as many probes as an error of `trace.rtol` takes,
`trace.max_matvecs` at most.
"""

from curvlab.lab import Target
from experiments.ngd.overfitting.paper import PAPER

TARGET = Target(
    __name__,
    title="LLC and Hessian trace while overfitting",
    paper=PAPER,
    compute="experiments.ngd.overfitting.compute:compute",
)
