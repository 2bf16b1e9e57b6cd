"""Time of one optimizer step: NGD against Adam and SGD, its Fisher updates included.

make bench-ngd-step PRESET=smoke|embedded|laptop|paper ARGS="ngd.update_period=1"

Only `optimizer.step()` is timed, on random gradients. NGD updates its estimates in one of every `update_period`
calls after the first ten, so what is timed is a whole period after those, divided by its steps: one update and
update_period - 1 calls without. The optimizers take turns, period by period, so that a busy machine slows all of
them; the ratio is that of neighbouring periods. The floor, "products", is NGD's large matrix products alone, in
the same period, without anything around them.

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
