"""Mushrooms: the only statement behind the slides' figures is that the method converges.

What else these runs show is in summary.csv: whether f ever rises, what gradient descent reaches in as many steps,
S against D, several directions.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, exact, out_of_reach, t_interval
from curvlab.lab import judge as verdict
from experiments.rank1.fig2.variants import best_variant, last_rows, log_gap


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge the claims, intervals over seeds."""
    table, further = computed["table"], computed["further"]
    last = last_rows(table)
    lemma = last[
        (last.method == "uniform direction")
        & (last.rule == "given")
        & (last.num_directions == 1)
        & (last.delta_scale == 0)
        & (last.sigma_scale == 1)
        & last.symmetrize.eq(True)
        & last.safeguard.eq(False)
    ]
    first = float(table[table.step == 0].gradient_norm.iloc[0])
    sample = (lemma.gradient_norm / first).to_numpy(dtype=float)
    interval = exact(sample[0], kind="every seed alike") if np.ptp(sample) == 0 else t_interval(sample)
    return [
        verdict(
            claims.claim("lemma-converges"),
            float(sample.mean()),
            interval,
            if_not_reproduced="σ grows as λ n, so the step is about a gradient step of length 1/(λ n): n times "
            "too short: see lemma-converges-long.",
        ),
        _longer(claims.claim("lemma-converges-long"), further),
        _best(claims.claim("best-beats-descent"), last),
    ]


def _longer(claim: Claim, further: pd.DataFrame) -> ClaimResult:
    own = further[further.reached.astype(bool)]
    if len(own) < len(further):
        most = float(further.gradient_norm_ratio.max())
        return out_of_reach(
            claim, f"A run is at {most:.2g} after {further.steps.max()} steps: raise further_steps."
        )
    ratios = (own.steps / own.bound).to_numpy(dtype=float)
    return verdict(claim, float(ratios.mean()), t_interval(ratios), if_not_reproduced="It contradicts the proof.")


def _best(claim: Claim, last: pd.DataFrame) -> ClaimResult:
    descent = last[last.method == "gradient descent"]
    plain = last[last.rule.eq("given") & last.delta_scale.eq(0) & last.num_directions.eq(1)]
    plain = plain[plain.symmetrize.eq(True) & plain.safeguard.eq(False)]
    best = best_variant(plain)
    gaps = (log_gap(best) - float(log_gap(descent).min())).to_numpy(dtype=float)
    rate = float(descent.lr_factor.iloc[int(log_gap(descent).to_numpy().argmin())])
    why = (
        f"c = {best.sigma_scale.iloc[0]:g} of {plain.sigma_scale.nunique()} against gradient descent with "
        f"{rate:g} / λ of {len(descent)} rates. Each choice is the best in the mean, on the runs that are judged."
    )
    return verdict(claim, float(gaps.mean()), t_interval(gaps), if_not_reproduced=why)
