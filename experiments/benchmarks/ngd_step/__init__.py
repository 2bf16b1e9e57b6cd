"""Time of one optimizer step: NGD against Adam and SGD, its Fisher updates included.

make bench-ngd-step PRESET=smoke|embedded|laptop|paper ARGS="ngd.update_period=1"

Only `optimizer.step()` is timed, on random gradients. NGD updates its estimates in one of every `update_period`
calls after the first ten, so what is timed is a whole period after those, divided by its steps: one update and
update_period - 1 calls without. The optimizers take turns, period by period, so that a busy machine slows all of
them; the ratio is that of neighbouring periods. The floor, "products", is NGD's large matrix products alone, in
the same period, without anything around them; "floor" adds the eigendecompositions of the updates. What NGD takes
above it are the small operations around them, a few microseconds each, 30 to 60 for each parameter tensor: most of
what it takes on small networks. ranks.csv has one model at several ranks.

Three steps of Adam are out of reach for small networks with the same numbers. On LeNet-5 (one core, CPU seconds,
the least of 40 repeats) Adam takes 0.32 ms and NGD 3.5: 8.8 with an update and 1.7 without. Of the 0.95 ms that
would be three steps of Adam the large products take 0.46, the eigendecompositions (1.4 ms in each update) 0.35;
what is left, 0.14 ms, is 30 small operations for ten tensors and 18 axes, and NGD needs 30 for each tensor.

On a CPU, Adam's own time has two values, a factor of 2 apart: where the C library hands the memory of its
temporaries back to the system after every use, each step takes page faults. Which of the two a process or a
repeat gets depends on what it allocated before; so the ratio to Adam has two values, too.
"""

from experiments.target import Target

TARGET = Target(
    __name__,
    title="Time of a step: NGD against Adam and SGD",
    paper={"num_repeats": "", "num_periods": "", "num_threads": ""},  # no paper times these
)
