"""Five gaps between influence functions and leave-one-out retraining (Bae et al. 2022, Table 5, Fig. 4).

make pbrf-tab5 PRESET=smoke|embedded|laptop|paper ARGS="num_points=5 damping=0.01"

A network is trained for K epochs. For each of 20 random training points it is trained again without the point:
cold start (same initial weights and batches, then K/2 epochs more), warm start (K/2 epochs from where it is), with
a proximity term, with the proximal Bregman objective, and with that linearised. Beside them stands the influence
estimate. A gap is the distance of two successive ones between the networks' outputs over the training set:
warm-start, proximity, non-convergence, linearisation, solver. `curvlab.influence.responses` has the objectives.

Where the paper leaves a choice: its table says "L2 distance between the networks' outputs"; ours stands divided
by √N, and as it is. Outputs are logits, or predictions. Leaving out is a weight of 0 in sums that are divided
by N, also in a minibatch. The L2 term belongs to the cost: its Bregman divergence adds to the damping, and it
adds to the curvature. The Bregman objectives see their point at every step (the others when it is in the
batch), at a tenth of the learning rate. Influence is solved by block conjugate gradients to 1e-6 where the
paper has LiSSA: "solver" is then how far SGD on the linearised objective is from its minimum. An autoencoder's
loss is the mean over pixels.

Misprints: Eq. 39 and 44 lack ½ (with 2 G Eq. 46 would not follow), Eq. 30 prints the norm of the proximity term
without its square, Eq. 48 and 49 must start at t = 0.
"""

from experiments.target import Target

TARGET = Target(
    __name__,
    title="Five gaps between influence and retraining",
    paper={
        "num_points": 20,
        "seeds": "1",
        "damping": "0.001, Transformer 0.01",
        "bregman_lr_divisor": 10,
        "table.csv:epochs": "1000 (MLP, autoencoder), 200 (convolutional), 10 (Transformer)",
        "influence.gauss_newton._target_": "LiSSA, depth 5000 or 10000, 5 repeats",
    },
    draw="experiments.pbrf.gap_plot:draw",
)
