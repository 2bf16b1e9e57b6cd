"""Fig. 5, claims: the larger NGD's learning rate, the faster its LLC rises, and the higher it ends."""

from __future__ import annotations

from itertools import pairwise

from curvlab.reporting import Claim, ClaimResult, Criterion, judge, out_of_reach, t_interval
from experiments.ngd.split_measures import SplitResults

SOURCE = "Saghir et al. 2024, Sec. 3.3, Fig. 5"


def judge_claims(found: SplitResults, *, claimed: dict[str, list[str]]) -> list[ClaimResult]:
    """Judge each panel's claimed branches, which are in the order of their learning rates, and its sgd."""
    results = []
    for panel, branches in claimed.items():
        growth, plateau = _claims(panel, branches)
        results += [
            _increasing(growth, found, panel, branches, "llc_growth"),
            _increasing(plateau, found, panel, branches, "llc_end"),
            _sgd_steady(found, panel),
        ]
    return results


def _claims(panel: str, branches: list[str]) -> tuple[Claim, Claim]:
    where = f"({panel}, {', '.join(branches)})"
    neighbours = "that of the next larger minus that of the smaller learning rate, mean over seeds, of the two "
    growth = Claim(
        id=f"llc-rises-faster-{panel}",
        statement=f"Increasing the learning rate of NGD makes its LLC rise faster {where}.",
        source=SOURCE,
        paper_value="faster, no number",
        measure="slope of the LLC over the first half of the epochs after the split (LLC an epoch): "
        + neighbours
        + "neighbours where it is smallest",
        criterion=Criterion(at_least=0.0),
    )
    plateau = Claim(
        id=f"llc-plateaus-higher-{panel}",
        statement=f"Increasing the learning rate of NGD makes its LLC plateau at a higher value {where}.",
        source=SOURCE,
        paper_value="higher, no number",
        measure="mean LLC over the second half of the epochs after the split: "
        + neighbours
        + "neighbours where it is smallest",
        criterion=Criterion(at_least=0.0),
    )
    return growth, plateau


def _increasing(
    claim: Claim,
    found: SplitResults,
    panel: str,
    branches: list[str],
    measure: str,
) -> ClaimResult:
    values = [found.by_seed(panel, branch, measure) for branch in branches]
    steps = [(after - before).dropna() for before, after in pairwise(values)]
    if any(len(step) < 2 for step in steps):
        return out_of_reach(claim, found.why_no_llc(panel, branches))
    smallest = min(steps, key=lambda step: step.mean())
    why = f"{found.all_branches(panel, measure)} {found.all_branches(panel, 'train_loss_ratio')}"
    return judge(claim, smallest.mean(), t_interval(smallest), if_not_reproduced=why)


def _sgd_steady(found: SplitResults, panel: str) -> ClaimResult:
    claim = Claim(
        id=f"llc-sgd-steady-{panel}",
        statement=f"The LLC of SGD, which goes on at its learning rate, remains steady ({panel}).",
        source=SOURCE,
        paper_value="steady, no number",
        measure="slope of the LLC's least-squares line from the split on, times the epochs, over the "
        "seeds' mean LLC at the split; mean over seeds",
        criterion=Criterion(at_least=-0.1, at_most=0.1),
    )
    values = found.by_seed(panel, "sgd", "llc_change")
    if len(values) < 2:
        return out_of_reach(claim, found.why_no_llc(panel, ["sgd"]))
    why = found.all_branches(panel, "llc_change")
    return judge(claim, values.mean(), t_interval(values), if_not_reproduced=why)
