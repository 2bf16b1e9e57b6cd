"""Training loss of Ginger over decay and rank, and over damping (Ginger 2024, Table 4).

make ginger-tab4 PRESET=smoke|embedded|laptop|paper ARGS="decays=[0.9,0.99] grid_ranks=[4]"

The trainings of ginger-tab3, of which this target reports the smallest loss of a training batch. The paper's text
says of both tables that Ginger is not sensitive to rank and decay; its printed losses differ by a factor of nine.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Training loss of Ginger over decay, rank and damping",
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
    after=("ginger/tab1", "ginger/tab3"),
)
