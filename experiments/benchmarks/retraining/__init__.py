"""Retrainings together against one by one: seconds, their ratio, and whether the parameters are the same.

make bench-retraining PRESET=smoke|embedded|laptop|paper ARGS="num_left_out=40"

Two questions. Points are left out one by one, and the network is trained again without each: by `train`, once for
each, and by `train_ensemble`, all at once on shared batches. And: how many single trainings is it to train on as
many random halves at once, as the linear datamodelling score asks for (bench-attribution)?

Whatever is compared is timed in the same repeat, turn about, and a ratio is that of one repeat; intervals are over
repeats. A repeat takes so many steps as the config says, not the whole training: every step does the same work.
Seconds are CPU seconds of this process, on one thread, after a first step that is not counted.

What a ratio can be at best stands in floors.csv: the matrix products of a step alone, forward and backward, of one
copy (a loop of products) and of all copies (batched products), and the update of the parameters alone. Together, a
step does the arithmetic of all copies, also for examples of weight 0; what it saves is what Python and PyTorch do
around each product, about a millisecond of a step of `train`. So the gain is large where a step's arithmetic is
far below that (64-32-10), and gone where it fills the time of a single training already (2 x 1024).

Parameters are compared after the steps that are timed. In single precision they may differ by far more than
rounding: a ReLU that is near zero for one example is on in one way of summing, and off in the other.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Retraining many networks at once, against one by one",
    judge=".claims:judge_claims",
    # no paper compares these
    paper={"num_left_out": "", "num_halves": "", "num_steps": "", "num_repeats": "", "dtypes": ""},
)
