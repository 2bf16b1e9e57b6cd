"""Mislabelled examples found against the fraction of the training set inspected (Bae et al. 2022, Fig. 6, D.3).

make pbrf-fig6 PRESET=smoke|embedded|laptop|paper ARGS="damping=0.01 fraction=0.2"

A tenth of the training labels is replaced by wrong ones, a network is trained on them, and the examples are
inspected from the highest score to the lowest: which score finds the wrong labels first? Self-influence by PBRF
(each example is left out by itself, and the proximal Bregman objective is minimised from the trained network on)
and by influence functions; random order; and what people use for this: the loss, the margin, the margin averaged
over the epochs of the training (area under the margin, Pleiss et al. 2020), and confident learning (Northcutt et
al. 2021) with probabilities from cross-validation by trainings of the same kind (the ranking is ours; cleanlab is
not called).

Where the paper leaves a choice. "The influence of removing a single training example on the total training loss
(self-influence scores)" names two things. Self-influence, in the works it cites, is the change of the example's
*own* loss: that is what "PBRF" and "influence" mean here; the change of the mean loss over the whole training set,
the example included, is a row of its own ("total loss"). "Random labels" are drawn from the other classes, so that
each is wrong. The number of epochs is not stated; it is 1,000 in the paper's C.3. It matters, since a network that
has learnt wrong labels by heart shows less of them: there are tasks that stop early and overfitted ones, and
networks.csv has the share of wrong labels that the network predicts.

Leaving out is a weight of -1/N (the paper's 1/N has the opposite sign). With it the objective of a wrong label is
mostly not bounded below (see `curvlab.influence.retraining`; Newton's method runs away): the PBRF is what so many
steps of full-batch descent with momentum give, as the paper's is what K/2 epochs of SGD give. How far the points
got stands in networks.csv: the norm of the objective's gradient at the end over that at the start, the share of
points that came below a tenth, and of those for which it grew. Influence is exact to a residual of `rtol`; with
`num_probes` it is estimated for all examples at once from so many systems, each score with a relative standard
error of √(2/num_probes). Everything is in single precision. Seeds share their images: intervals are over wrong
labels, starts and orders of batches.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Mislabelled examples found by PBRF, influence and everyday scores",
    judge=".claims:judge_claims",
    paper={
        "data.num_train": 6000,
        "model.hidden_sizes": "2 x 1024",
        "training.num_epochs": "not stated here, 1000 in C.3",
        "training.batch_size": 128,
        "fraction": 0.1,
        "damping": 0.001,
        "seeds": "not stated",
        "descent.num_steps": "K/2 epochs, in C.2",
        "influence.num_probes": "LiSSA, in C.2",
    },
)
