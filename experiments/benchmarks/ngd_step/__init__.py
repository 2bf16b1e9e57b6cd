"""Time of one optimizer step: NGD against Adam and SGD, its Fisher updates included.

make bench-ngd-step PRESET=smoke|embedded|laptop|paper ARGS="ngd.update_period=1"

Only `optimizer.step()` is timed, on random gradients. NGD updates its estimates in one of every `update_period`
calls after the first ten, so what is timed is a whole period after those, divided by its steps: one update and
update_period - 1 calls without. The optimizers take turns, period by period, so that a busy machine slows all of
them; the ratio is that of neighbouring periods. The floor, "products", is NGD's large matrix products alone, in
the same period, without anything around them; "floor" adds the eigendecompositions of the updates. What NGD takes
above it are the other products and the small operations. ranks.csv has one model at several ranks.

parts.csv has what a step of a small network is made of, call by call, on one thread. LeNet-5's, of ten tensors
and 18 axes, makes 340 to 360 calls of PyTorch with an update and 53 to 84 without. (It made 1,563 and 423, and
took 3.6 ms; every number of a trajectory is the same.) CPU seconds, medians of 150, on a busy machine: Adam 0.41
to 0.49 ms, NGD 1.7 to 1.9, 3.8 to 4.2 steps of Adam, as long as its calls alone, one after another: Python
around them adds nothing that could be spared. The products take 1.6 × Adam, the eigendecompositions 0.9. Calling
the others costs 0.4 even if they have nothing to do, so that the least is 2.8 × Adam; three would leave 0.1 for
what small tensors take in them, norms and copies of gradients first, which is 1.1. The FFNN of 256-256 is above
three by its products alone (3.1), and so is ResNet-18 at the default rank, 80 (3.1): ranks.png says at which
rank it is not.

On a CPU, Adam's own time has two values, a factor of 2 apart: where the C library hands the memory of its
temporaries back to the system after every use, each step takes page faults. Which of the two a process or a
repeat gets depends on what it allocated before; so the ratio to Adam has two values, too.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Time of a step: NGD against Adam and SGD",
    paper={"num_repeats": "", "num_periods": "", "num_threads": ""},  # no paper times these
)
