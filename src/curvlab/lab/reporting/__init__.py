"""From numbers to verdicts, figures and the report: claims, intervals, plots, results pages."""

from curvlab.lab.reporting.claim_sheet import ClaimSheet, load_claim_sheet, load_claims, save_claims
from curvlab.lab.reporting.claims import (
    Claim,
    ClaimResult,
    Criterion,
    judge,
    out_of_reach,
)
from curvlab.lab.reporting.intervals import Interval, bootstrap_interval, exact, t_interval

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
