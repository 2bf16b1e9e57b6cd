"""From numbers to verdicts: intervals, claims and the files that state and keep them."""

# ruff: noqa: F401  (names that others import from here)
from curvlab.lab.claims.claim_sheet import ClaimSheet, load_claim_sheet, load_claims, save_claims
from curvlab.lab.claims.claims import Claim, ClaimResult, Criterion, judge, out_of_reach, withheld
from curvlab.lab.claims.intervals import Interval, bootstrap_interval, exact, t_interval
