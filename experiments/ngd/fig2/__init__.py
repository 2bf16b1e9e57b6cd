"""LLC and tr(H) over epochs, NGD against SGD (Saghir et al. 2024, Fig. 2), and at matched training loss.

make ngd-fig2 PRESET=smoke|embedded|laptop|paper ARGS="data=fashion_mnist optimizers.ngd.alpha=4"

Both optimizers start from the same weights and see the same batches. NGD is Kaldi's online natural gradient with
its output rescaled to the gradient's norm, our reading of the paper's Eqs. 6 and 7 (see curvlab.optim.NGD). An
estimate counts as an LLC only where the chains have mixed and stayed above the start; the others are in the table,
marked. `llc` is measured from the minimum near the weights; the paper's, from the weights, is `llc_raw`, and lacks
`descent`. The paper compares at equal epochs; since the optimizers fit at different speed, the last panel and
matched.csv compare at equal training loss. tr(H) is the mean Hessian's over a fixed part of the training data, by
as many probes as an error of `trace.rtol` takes, `trace.max_matvecs` at most. Nothing is tuned: both train at one
learning rate, as in the paper.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="LLC and Hessian trace over epochs",
    paper={
        "tasks": "FFNN and LeNet-5",
        "seeds": "not stated",
        "training.num_epochs": "not stated",
        "optimizers.*.lr": 0.01,
        "optimizers.ngd.alpha": 0.1,
        "training.batch_size": 128,
        "trace.max_matvecs": 10000,
    },
)
