"""WBIC of NGD against the validation loss while it overfits (Saghir et al. 2024, Fig. 8).

make ngd-fig8 PRESET=smoke|embedded|laptop|paper ARGS="label_noise=0.2"

The same networks and estimates as ngd-fig7's, from the store where they have been computed. WBIC = n E[L(w)] at
inverse temperature n/ln n, that is n L(w*) + LLC ln n: the figure shows both terms, because overfitting lowers the
first while it raises the second, and which of the two wins is what the paper's claim comes to.
"""

from experiments.target import Target

TARGET = Target(
    __name__,
    title="WBIC while overfitting",
    paper={
        "data.num_train": "60000, not stated",
        "label_noise": "none",
        "model.hidden_sizes": "not stated",
        "seeds": "not stated",
        "training.num_epochs": "not stated",
        "optimizers.ngd.lr": 0.01,
        "optimizers.ngd.alpha": 0.1,
        "training.batch_size": 128,
        "trace.max_matvecs": 10000,
    },
    compute="experiments.ngd.overfitting.compute:compute",
    after=("ngd/fig7",),
)
