"""From numbers to verdicts: intervals, claims and the files that state and keep them."""

from curvlab.lab.claims.claim_sheet import ClaimSheet, load_claim_sheet, load_claims, save_claims
from curvlab.lab.claims.claims import Claim, ClaimResult, Criterion, judge, out_of_reach
from curvlab.lab.claims.intervals import Interval, bootstrap_interval, exact, t_interval

__all__ = [
    "Claim",
    "ClaimResult",
    "ClaimSheet",
    "Criterion",
    "Interval",
    "bootstrap_interval",
    "exact",
    "judge",
    "load_claim_sheet",
    "load_claims",
    "out_of_reach",
    "save_claims",
    "t_interval",
]
