"""Learning coefficients beside a peer's, and where the answer is known: polynomials, deep linear networks.

make bench-llc PRESET=smoke|embedded|laptop|paper ARGS="parts=[peers] num_chains=16"

**Peers** (table.csv, summary.csv, timings.csv): agreement with devinterp 1.3.2, and seconds beside it and beside
the arithmetic. The same model, hyperparameters, number of chains and draws for everybody, and the same initial
loss over all the data. devinterp's default nbeta takes the batch for the data (n = batch size), so it is passed;
it samples in `train()` mode, which changes nothing for a fully connected net. Methods take turns, so that a busy
machine slows all of them, and a ratio is that of neighbours. The floor is the matrix products alone that these
chains need, forward and backward, without anything around them; the normals stand beside it.

devinterp reads a shuffled loader, so a step's batch is new to the chain until the epoch is over, and its loss is
that of unseen examples: above L(w) by about lr/B E|g_i|² times the share of examples seen, lr = step_size nbeta/2.
With replacement, as `estimate_llc` draws, it is unbiased; devinterp is shown with both samplers.
default_sampler.csv tests that reason: from devinterp's defaults to the settings here, one change at a time, with
curvlab's estimate at the same settings, and the loss of devinterp's batches beside that of all the data along its
chains (default_sampler.py).

known.csv: polynomials whose value at this n is known by quadrature (polynomials.py). power.csv: how often the
diagnostics of an estimate flag a drift that was planted, and one that was not.

**Exact** (exact.csv, exact_noises.csv): deep linear networks beside their exact values at this n, temperature and
localization, by Gibbs sampling (exact.py). The samplers at what `choose_sgld_settings` finds for them, SGLD at a
step that is set where the chains start, a twentieth of the limit of stability, but above it where they live; and
SGLD and averaged noises at equal steps and batches. Aoyagi's (2024) coefficient, that of n to infinity, is the
asymptote. At the localizations that the library chooses the exact value, which its estimates meet, is up to a
quarter below that coefficient (`asymptote-chosen`): a localization holds directions of little curvature.
"""

from __future__ import annotations

from curvlab.lab import Target
from experiments.benchmarks.llc import exact, peers
from experiments.benchmarks.parts import of_parts

TARGET = Target(
    __name__,
    title="Learning coefficients beside devinterp and beside exact values",
    paper={  # no paper compares these
        "num_chains": "",
        "num_draws": "",
        "num_repeats": "",
        "num_threads": "",
        "exact.num_examples": "infinity (Aoyagi 2024)",
    },
)
compute, judge, draw = of_parts({"peers": [peers], "exact": [exact]})
