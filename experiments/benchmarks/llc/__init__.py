"""Learning coefficients: agreement with devinterp 1.3.2, and seconds beside it and beside the arithmetic.

make bench-llc PRESET=smoke|embedded|laptop|paper ARGS="num_chains=16"

The same model, hyperparameters, number of chains and draws for everybody, and the same initial loss over all the
data. devinterp's default nbeta takes the batch for the data (n = batch size), so it is passed; it samples in
`train()` mode, which changes nothing for a fully connected net. Methods take turns, so that a busy machine slows
all of them, and a ratio is that of neighbours. The floor is the matrix products alone that these chains
need, forward and backward, without anything around them; the normals stand beside it.

devinterp reads a shuffled loader, so a step's batch is new to the chain until the epoch is over, and its loss is
that of unseen examples: above L(w) by about lr/B E|g_i|² times the share of examples seen, lr = step_size nbeta/2.
With replacement, as `estimate_llc` draws, it is unbiased; devinterp is shown with both samplers.
default_sampler.csv tests that reason: from devinterp's defaults to the settings here, one change at a time, with
curvlab's estimate at the same settings, and the loss of devinterp's batches beside that of all the data along its
chains (see default_sampler.py).

known.csv, beside it: polynomials whose value at this n is known by quadrature (see known.py).
Deep linear networks, whose exact value is known, are bench-llc-exact's.
power.csv: how often the diagnostics of an estimate flag a drift that was planted, and one that was not (power.py).
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Learning coefficients beside devinterp",
    # no paper compares these
    paper={"num_chains": "", "num_draws": "", "num_repeats": "", "num_threads": ""},
)
