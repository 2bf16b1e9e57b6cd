"""Accuracy of Ginger over decay and rank, and over damping (Ginger 2024, Table 3).

make ginger-tab3 PRESET=smoke|embedded|laptop|paper ARGS="decays=[0.9,0.99] grid_ranks=[4]"

The paper varies decay and rank and finds Ginger not sensitive to them. It does not vary the damping, nor say what
it was. Here both: the grid with the learning rate and the damping that ginger-tab1 tunes, and dampings from 1e-5,
the published code's, to 1, each with a learning rate tuned with the budget of a racer, without clipping
and with the published code's.

The paper reports the best validation accuracy; claims here are about the test accuracy of the epoch that
validation prefers. Trainings are shared with ginger-tab1 and ginger-tab4.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Accuracy of Ginger over decay, rank and damping",
    compute="experiments.ginger.race.sensitivity:compute",
    paper={
        "tasks": ["ResNet-18 on CIFAR-100"],
        "num_epochs": 200,
        "batch_size": 128,
        "decays": [0.9, 0.99, 0.999],
        "grid_ranks": [2, 4, 8],
        "seeds": "not stated",
        "table.csv:damping": "not stated, not varied; 1e-5 in the published code",
    },
    after=("ginger/tab1",),
)
