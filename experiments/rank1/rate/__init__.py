"""Steps to ‖∇f‖ <= ε against the lemma's K(ε) (Semenov 2025, uniform directions).

make rank1-rate PRESET=smoke|embedded|laptop|paper ARGS="max_steps=10000"

The method as in the lemma: S, one direction, δ = 0, α_k = sqrt(M ‖∇f‖ / 2) + λ sqrt(n (n - 1)), no safeguard. M
and λ are global constants in closed form, except for the networks in `tasks`, where both are the largest values on
the path, as measured by the optimizer. Eq. 3 is taken with log(‖∇f(x_0)‖ / ε); as printed, / 2, it is no bound:
the first objective is run a second time, multiplied by 1e-12, which changes no step.

The lemma says that f may be non-convex, and bounds D - H on average. Its proof needs D positive semi-definite
(or nearly, as for convex f): on the trapping curve, where it is not, the method cycles for ever. Not even
D + α_k I need be definite: `definiteness.csv` counts draws where it is not, for H = diag(cos x_i) near a maximum.
`growth` in summary.csv is the slope of log steps on log 1/ε; the bound's are 3/2 (σ = 0) and 2.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Steps to ε against K(ε)",
    paper={
        "table.csv:objective": "any",
        "max_steps": "K(ε)",
        "max_steps_network": "K(ε)",
        "num_seeds": "none",
    },
)
