"""LLC of networks trained by NGD and by SGD, over widths and depths (Saghir et al. 2024, Fig. 1).

make ngd-fig1 PRESET=smoke|embedded|laptop|paper ARGS="data=fashion_mnist seeds=[0,1,2]"

Both optimizers start from the same weights and see the same batches for as many epochs. An LLC is given only where
training has converged (training loss below `converged_below`) and the estimate is valid: chains mixed, loss not
below the start; the others stand in the table with the reason. It is measured from the minimum near the trained
weights (`llc`), since from the weights themselves, as in the paper, it lacks what the loss can still fall
(`descent`); `llc_raw` is the paper's, hollow in the figure. The t-tests are Welch's, over seeds. The paper's
"t-value of 1.9^-31" is a p-value of 1.9e-31. NGD as in ngd-fig2.

The paper compares at one learning rate. For the networks of `tuned_and_matched` the second figure asks how the
answer depends on that: each optimizer at the learning rate of its smallest validation loss, chosen from one grid
with equal seeds and epochs (tuning.csv, tuned.csv), and both at equal training loss, interpolated between
checkpoints (equal.csv, matched.csv). settings.csv puts them beside the paper's setting, for the LLC and for tr(H),
the other quantity of ngd-fig2.

An LLC is a number for one localization γ: directions of curvature below γ/(nβ) count little. The paper states
neither γ nor the step size. For the networks of `cutoffs` the third figure samples again, with weaker and stronger
localizations and with other step sizes (cutoffs.csv, cutoff_summary.csv): does the difference keep its sign, and
its size?
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="LLC of NGD and SGD over widths",
    paper={
        "data.num_train": "60000, not stated",
        "widths": "a range, in the figure",
        "seeds": "not stated",
        "training.num_epochs": "not stated",
        "optimizers.*.lr": "0.01 for both; no tuning stated",
        "optimizers.ngd.alpha": 0.01,
        "training.batch_size": 128,
        "tuned_and_matched.lrs": "no such comparison",
        "tuned.csv:lr": "no such comparison",
        "llc.localization": "not stated",
        "llc.step_size": "not stated",
        "cutoffs.localizations": "no such comparison",
        "settings_tried": "not stated",
    },
)
