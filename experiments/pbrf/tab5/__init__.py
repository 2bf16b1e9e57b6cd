"""Five gaps between influence functions and leave-one-out retraining (Bae et al. 2022, Table 5, Fig. 4).

make pbrf-tab5 PRESET=smoke|embedded|laptop|paper ARGS="num_points=5 damping=0.01"

A network is trained for K epochs. For each of 20 random training points it is trained again without the point:
cold start (same initial weights and batches, then K/2 epochs more), warm start (K/2 epochs from where it is), with
a proximity term, with the proximal Bregman objective, and with that linearised. Beside them stands the influence
estimate. A gap is the distance of two successive ones between the networks' outputs over the training set:
warm-start, proximity, non-convergence, linearisation, solver. `curvlab.influence.retraining` has the objectives.

Where the paper leaves a choice: its table says "L2 distance between the networks' outputs"; ours stands divided
by √N, and as it is (where only a part of the training set is compared, `gap_examples`, per example times √N).
Outputs are logits, or predictions. Leaving out is a weight of 0 in sums that are divided by N, also in a
minibatch. The L2 term belongs to the cost: its Bregman divergence adds to the damping, and it adds to the
curvature. The Bregman objectives see their point at every step (the others when it is in the batch), at a tenth
of the learning rate. Retrainings go on with the base run's schedule: on CIFAR-10 their rates are those after all
three decays. Momentum and Adam's averages start from zero at θ^s, but run through in the cold start: that is in
the warm-start gap. Learning rates with a grid are chosen by validation loss, in the convolutional rows by
validation accuracy.

Influence is solved by block conjugate gradients where the paper has LiSSA: "solver" is then how far SGD on the
linearised objective is from its minimum. Residuals: `embedded` 1e-6 (convolutional network and Transformer 1e-4);
`laptop` 1e-4, and 1e-2 for all but regressions and logistic regression; `paper` LiSSA, with the smallest of the
paper's scalings whose residual is at most 0.1. A row above 0.1 is judged out of reach, and so is one that learned
nothing: whose training loss at θ^s is not below that of the best constant outputs.

An autoencoder's loss is the mean over pixels, where Martens & Grosse (2015), whose set-up the paper takes, have
the sum: λ and the L2 term are 784 times (64 times for digits) as strong beside it as they would be beside a sum.
Its weights start as `SigmoidMLP` has it, since the default start learns nothing but the mean image; the paper
does not state its own. A point of the Penn Treebank is a sequence of 35 tokens of a byte-pair encoding of
10,000.

`embedded` has stand-ins: scikit-learn's diabetes (a regression) for Concrete and Energy, and, split at its median,
for the Pima table; 500 digits for MNIST, with a ConvNet for LeNet; 40 paragraphs of scikit-learn's documentation
in sequences of 32 tokens for the Penn Treebank. Breast cancer is the paper's. Claims are judged by geometric means
over seeds and their t intervals: the points of one seed share a network and its drift. There, autoencoder,
ConvNet and Transformer have 2 or 3 points a seed, not 20, and the last two have one seed, which decides nothing.

Misprints: Eq. 39 and 44 lack ½ (with 2 G Eq. 46 would not follow), Eq. 30 prints the norm of the proximity term
without its square, Eq. 48 and 49 must start at t = 0.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Five gaps between influence and retraining",
    paper={
        "num_points": 20,
        "seeds": "not stated",
        "damping": "0.001, Transformer 0.01",
        "bregman_lr_divisor": 10,
        "table.csv:epochs": "1000 (MLP, autoencoder), 200 (convolutional), 10 (Transformer)",
        "influence.gauss_newton._target_": "LiSSA, depth 5000 or 10000, 5 repeats",
    },
    draw="experiments.pbrf.gap_plot:draw",
)
