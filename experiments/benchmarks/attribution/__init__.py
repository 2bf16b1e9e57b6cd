"""Which score predicts retraining, and at what cost?

make bench-attribution PRESET=smoke|embedded|laptop|paper ARGS="peers_python=DIR/bin/python num_subsets=200"

One network is trained, and every method scores all training examples for the losses of some test examples. Then
networks are trained on random halves, all together on shared batches, and two questions are asked. The linear
datamodelling score (LDS; Park et al. 2023): how well do the scores rank what the halves do to a test loss?
Spearman's correlation, mean over test examples; once with the halves trained in the very order of batches that the
scored network saw, where a perfect first-order answer is the unrolled derivative, and once in other orders.
Removal: how much does a test loss rise when the examples that are ranked most helpful to it are left out?
Removal of as many examples at random stands beside it.

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

which_score.csv is the answer in one table: for each question, what the PBRF says among them, every score's
agreement and its cost in trainings, influence with the damping of the run's length, of the best LDS, and of the
PBRF paper; what the PBRF says where it was not minimised is out of reach. rest.csv says where the rest goes, by
predictors each of which lacks less than the one before: the filter; the best function of the same matrix, found in
hindsight on the halves that judge it, so that the filter is never above it, but SOURCE and the derivative, which
are fitted to nothing, may be below; SOURCE with matrices on the way; the exact derivative; retraining with weights
moved part of the way only; and retraining in another order of the batches, which says what one whole retraining is
worth where the order is not known. part_way.csv has the scores against retraining a quarter, half, ... of the way.
ranks.csv has all that an LDS is made of.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Which score predicts retraining",
    # no paper compares these
    paper={"num_queries": "", "num_subsets": "", "num_orders": "", "dampings": "", "training.num_epochs": ""},
)
