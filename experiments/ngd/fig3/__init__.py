"""Smoothing constants alpha and epsilon of NGD against its LLC (Saghir et al. 2024, Fig. 3).

make ngd-fig3 PRESET=smoke|embedded|laptop|paper ARGS="data=fashion_mnist alphas=[0.01,1]"

Every network of a seed starts from the same weights and sees the same batches; SGD, which NGD becomes for alpha ->
∞ (at this lr, see curvlab.optim.NGD), is the band in both panels. One constant is varied at a time, the other
stands as in `ngd`; the paper says for neither panel what it was. epsilon is a floor of the eigenvalues of each
axis's estimate, an element's squared gradient, so it matters from there on; alpha multiplies it. An LLC is given
only where training has converged and the estimate is valid, and from the minimum, as in ngd-fig1; the others are
drawn hollow and count in no claim. Networks differ in training loss, too, so the sweep of alpha is shown a second
time at equal loss (`equal_loss`). A task of its own takes exact NGD, with the full Fisher matrix of each batch.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Smoothing of the Fisher matrix against the LLC",
    paper={
        "data.num_train": "not stated",
        "model.hidden_sizes": "not stated",
        "seeds": "not stated",
        "training.num_epochs": "not stated",
        "ngd.lr": "not stated; 0.01 elsewhere",
        "ngd.alpha": "in the sweep of epsilon: not stated",
        "ngd.epsilon": "in the sweep of alpha: not stated; 1e-10 elsewhere",
    },
)
