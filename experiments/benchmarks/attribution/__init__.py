"""Which score predicts retraining, and at what cost? Are the libraries' scores right, and how fast is retraining?

make bench-attribution PRESET=smoke|embedded|laptop|paper ARGS="peers_python=DIR/bin/python parts=[scores]"

A task says what it is `used_in`; what stands in the sections `libraries` and `retraining` holds for these parts.

**Scores.** The protocol is the single run: halves start from the scored network's weights and take as many
steps. So every sentence here is of one network and of single runs; bench-board asks on three networks, against
other seeds and by the standard protocol, and its claims say which of them survive. One network is trained, and
every method scores all training examples for the losses of some test examples. Then networks are trained on random
halves, all together on shared batches, and two questions are asked. The linear datamodelling score (LDS; Park et
al. 2023): how well do the scores rank what the halves do to a test loss? Spearman's correlation, mean over test
examples; once with the halves trained in the very order of batches that the scored network saw, where a perfect
first-order answer is the unrolled derivative, and once in other orders. Removal: how much does a test loss rise
when the examples that are ranked most helpful to it are left out? Removal of as many examples at random stands
beside it.

Scores are in one unit, the change of the test loss per unit of weight added to an example's loss in the mean
training loss, so that helpful examples score negative; peers are negated where they have the opposite sign. A
half's loss is the mean over the half. The order of the batches is the only chance: all networks start from the
same weights. Intervals of LDS, of the table and of the claims, resample halves and test examples (random removals:
draws and test examples; other removals: test examples); the network is one. Seconds are processor time; a training
is one of `curvlab.training.train`. TRAK has one checkpoint here, where its authors average tens; it stands as
shipped, without a ridge, and with the best of a grid. dattri 0.3.0's EK-FAC stands as shipped, which rotates by
transposed eigenvectors and shifts biases, and with both mended. Of the ConvNet and the OPT peers see layers
(`remark` in the table): kronfluence Linear and Conv2d ones, dattri Linear ones, of which it takes no sequences.
TRAK ships no output of a language model: it gets the mean over tokens of log p/(1 - p), as its images have it.

The proximal Bregman response (PBRF; Bae et al. 2022, Eq. 8) stands there twice: of every training example that is
left out alone, as a score, at the damping of the run's length and at the paper's; and of each half at once, which
adds nothing up and ranks no example. Its gradient norm at the end, over that at the start, says how well it was
minimised: at a small damping many examples' objectives have no minimum nearby.

Note of 2026-11-24: tables of before had a row "unrolled over all orders", whose orders were those that judged it;
it is taken out of them. Runs since average over other orders. "As good as the best" stands since by the interval
of the paired difference to the best; before, by the best's own interval. Seconds of the tables of before contain
what PyTorch loads for the first call of a method, about half a second of the gradient product.

which_score.csv is the answer in one table: for each question, what the PBRF says among them, every score's
agreement and its cost in trainings, influence with the damping of the run's length, of the best LDS, and of the
PBRF paper; what the PBRF says where it was not minimised is out of reach. rest.csv says where the rest goes, by
predictors each of which lacks less than the one before: the filter; the best function of the same matrix, found in
hindsight on the halves that judge it, so that the filter is never above it, but SOURCE and the derivative, which
are fitted to nothing, may be below; SOURCE with matrices on the way; the exact derivative; retraining with weights
moved part of the way only; and retraining in another order of the batches, which says what one whole retraining is
worth where the order is not known. part_way.csv has the scores against retraining a quarter, half, ... of the way.
ranks.csv has all that an LDS is made of.

**Libraries** (libraries.csv): influence scores of the public libraries against exact ones. The influence of all
training digits on some test digits, -∇l(test)ᵀ (A + damping I)⁻¹ ∇l(point), with an MLP that is trained to a small
loss. A is the matrix that the library inverts or approximates: dattri's EK-FAC takes gradients at the true labels,
the empirical Fisher matrix; kronfluence's draws labels. Exact scores are solved in double precision,
`reference_residual` says how far; a network of up to `hessian_dense` parameters has its Hessian factorised. The
LDS beside them is of one network: intervals of good methods overlap, and which of the two dampings is ahead says
little (bench-board has them on more networks). Every method runs in a process of its own, one thread, and is
measured from the trained model to the scores, in processor time. Correlation is Pearson's over the training
digits, query by query: a library may scale its scores as it likes. Libraries whose dependencies exclude ours
(pyDVL wants numpy below 2) live in an environment of their own, the extra `peers`; its Python is the setting
`peers_python` or the environment variable CURVLAB_PEERS_PYTHON. Without one their rows say "not installed".

Note of 2026-11-26: tables of before have no column `reference_residual`. In them the Hessian's exact scores had
residuals of some per cent, so that agreement with them is not known; dattri's EK-FAC stands against the
Gauss-Newton matrix, as all methods do where there is no column `matrix`; plain gradients against themselves. The
table of `laptop` is such a one, without matrix and LDS: no store has its units any more, and the three quarters of
an hour of a core that they would take were not to be had.

**Retraining** (retraining.csv, retraining_timing.csv): retrainings together against one by one. Points are left
out one by one, and the network is trained again without each: by `train`, once for each, and by `train_ensemble`,
all at once on shared batches. And: how many single trainings is it to train on as many random halves at once, as
the LDS asks for? What a ratio can be at best stands in floors.csv: the matrix products of a step alone, forward
and backward, of one copy (a loop of products) and of all copies (batched products), and the update of the
parameters alone. Together, a step does the arithmetic of all copies, also for examples of weight 0; what it saves
is what Python and PyTorch do around each product, about a millisecond of a step of `train`. So the gain is large
where a step's arithmetic is far below that (64-32-10), and gone where it fills the time of a single training
already (2 x 1024). Parameters are compared after the steps that are timed. In single precision they may differ by
far more than rounding: a ReLU that is near zero for one example is on in one way of summing, and off in the other.
"""

from __future__ import annotations

from curvlab.lab import Target
from experiments.benchmarks.attribution import claims, exactness, plot, retraining
from experiments.benchmarks.attribution import compute as scores
from experiments.benchmarks.parts import of_parts

TARGET = Target(
    __name__,
    title="Which score predicts retraining; scores of the public libraries; retraining together",
    paper={  # no paper compares these
        "num_queries": "",
        "num_subsets": "",
        "num_orders": "",
        "dampings": "",
        "training.num_epochs": "",
        "libraries.num_queries": "",
        "libraries.damping": "",
        "retraining.num_left_out": "",
        "retraining.num_halves": "",
        "retraining.num_steps": "",
        "retraining.num_repeats": "",
    },
    timings=("retraining", "retraining_timing", "floors", "faster-together-*", "*halves*"),
)
PARTS = {"scores": [scores, claims, plot], "libraries": [exactness], "retraining": [retraining]}
compute, judge, draw = of_parts(PARTS)
