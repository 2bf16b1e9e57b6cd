"""Ginger, QNG, first-order methods and the wider field: one race with one budget (Ginger 2024, Table 1).

make ginger-tab1 PRESET=smoke|embedded|laptop|paper ARGS="ranks=[4] seeds=range(5)"

Image classification with no schedule and no weight decay, momentum 0.9 and second-moment decay 0.99. A part of the
training set is set aside for validation; it chooses settings and, as in the paper, the epoch that is reported.
Claims are about the test set at that epoch, which has chosen nothing; the paper has no such set.

Every racer tunes its settings with the same number of gradients (a step of Ginger and QNG takes two): the learning
rate from {1, 5} x 10^{-1..-4}, and for Ginger also the damping, which the paper does not state and which decides:
at the 1e-5 of the published code every rate of this grid diverges without that code's clipping. As in the paper
settings are tuned at one rank and kept for the others. Runs of one seed start from the same weights and see the
same batches. Final runs have equal steps, so that a racer of two gradients a step, or with more settings to choose
among, chooses by shorter trainings: tuning.csv has their steps. Where the best rate lies at the edge of the grid
the figure marks it.

What the paper lacks: NGD (Kaldi's), Muon (hidden weight matrices; Adam for vectors and the last layer) and SOAP;
Adam with Ginger's extra gradients; and ablations that take Ginger apart: one matrix for all parameters or one for
each tensor, clipping each entry of the update at 1 or not, labels sampled from the model or the data's own, the
published settings with and without any curvature (without it, the update is the clipped average gradient over the
damping: close to its sign), and QNG as published against as coded. A racer that diverged is shown so.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Ginger, QNG, first-order methods and the wider field in one race",
    paper={
        "tasks": ["ResNet-18 on CIFAR-100", "ResNet-50 on CIFAR-100"],
        "num_epochs": 200,
        "batch_size": 128,
        "ranks": [1, 2, 4, 8, 16, 32],
        "lrs": [0.1, 0.5, 0.01, 0.05, 0.001, 0.005, 0.0001, 0.0005],
        "tuning.num_gradients": "not stated",
        "seeds": "not stated",
        "num_validation": "not stated; of the 10,000 test images",
        "augment": True,
        "table.csv:damping": "not stated; 1e-5 in the published code",
        "table.csv:clip": "not mentioned; 1 in the published code",
    },
    digits={"curves": 4},
)
