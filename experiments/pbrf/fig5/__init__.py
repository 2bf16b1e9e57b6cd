"""What the five gaps depend on (Bae et al. 2022, Sec. 6.2, App. C.4).

make pbrf-fig5 PRESET=smoke|embedded|laptop|paper ARGS="factor=width level=48"

The decomposition of `pbrf-tab5`, with one thing changed at a time: width and depth of the network, epochs and
weight decay of its training, damping, and how much of the training set is left out. Beside the five gaps stand
`whole`, the distance between cold optimum and influence estimate, and what each of the two moves from θ^s,
`retrained` and `moved`. A solver error as large as `moved` says that the linearised response has hardly begun: K/2
epochs at a tenth of the rate reach 1/(ηT), not the damping (pbrf-tab6 carries it on). Widths and depths change the
network, so that every level has its own base run; damping and what is removed do not.

As a sweep, in processes that may run at once and be killed: `python -m experiments run pbrf-fig5 -m
factor=width,depth,epochs,weight_decay,damping,removed`, or `-m factor=width level=16,32,64`, a level of its own
included. All jobs share the store: `make pbrf-fig5` then finds their units and computes nothing, and
`python -m experiments gather pbrf-fig5` puts the tables of the variations into one.

What can be sourced: Sec. 6.2 and its figure are in the main text, which we do not have; App. C.4 gives settings
and no number. So no claim states what the figure shows. Claims hold the directions that follow from the
appendix's equations and sentences, and, for width and depth, what Klochkov & Liu (2024) report of Basu et al.
(2020). Directions of all the other gaps are in slopes.csv, without a verdict and not corrected for their number.

Where the paper leaves a choice: "the percentage" in {0.1, ..., 0.9} is read as a fraction, 10 % to 90 %
(`factor=removed level=0.001` is the other reading); the groups are random, one inside the other along the levels;
their number is that of the points. A group of more than 32 enters the Bregman objective by its members in the
batch. It is not bounded below then (see `ProximalBregmanCost`); what diverges is nan, and networks.csv names it.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Five gaps against width, depth, epochs, weight decay, damping, fraction removed",
    paper={
        "model.hidden_sizes": [1024, 1024],
        "table.csv:N": 6000,
        "training.num_epochs": 1000,
        "training.batch_size": 128,
        "training.lr": [1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001],
        "damping": 0.001,
        "num_points": 20,
        "seeds": "not stated",
        "factors.width": [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192],
        "factors.depth": [1, 3, 5, 7, 9, 11, 13, 15],
        "factors.epochs": [100, 500, 1000, 3000, 5000, 7000, 9000],
        "factors.weight_decay": [0.5, 0.1, 0.05, 0.01, 0.005, 0.001, 0.0005, 0.0001, 0.00005, 0.00001],
        "factors.damping": "0.5 to 0.000001, 12 levels",
        "factors.removed": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9],
    },
)
