"""From numbers to verdicts, figures and the report: claims, intervals, plots, scoreboard, results page."""

from curvlab.lab.reporting.claim_sheet import ClaimSheet, load_claim_sheet
from curvlab.lab.reporting.claims import Claim, ClaimResult, Criterion, judge, out_of_reach
from curvlab.lab.reporting.claims_file import load_claims, save_claims
from curvlab.lab.reporting.intervals import Interval, bootstrap_interval, exact, t_interval
from curvlab.lab.reporting.paper_numbers import PaperNumber, PaperNumbers, load_paper_numbers

__all__ = [
    "Claim",
    "ClaimResult",
    "ClaimSheet",
    "Criterion",
    "Interval",
    "PaperNumber",
    "PaperNumbers",
    "bootstrap_interval",
    "exact",
    "judge",
    "load_claim_sheet",
    "load_claims",
    "load_paper_numbers",
    "out_of_reach",
    "save_claims",
    "t_interval",
]
