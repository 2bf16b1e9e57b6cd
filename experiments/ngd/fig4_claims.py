"""Fig. 4, claims: after the split the step size changes little but fluctuates, and the LLC of NGD rises faster."""

from __future__ import annotations

from curvlab.reporting import Claim, ClaimResult, Criterion, judge, out_of_reach, t_interval
from experiments.ngd.split_measures import SplitResults

SOURCE = "Saghir et al. 2024, Sec. 3.3, Fig. 4"


def judge_claims(found: SplitResults, *, claimed: dict[str, str]) -> list[ClaimResult]:
    """Judge each panel's claimed branch against its sgd; intervals are over seeds."""
    results = []
    for panel, branch in claimed.items():
        results += [
            _update_norm(found, panel, branch),
            _fluctuation(found, panel, branch),
            _rises(found, panel, branch),
            _faster(found, panel, branch),
        ]
    return results


def _update_norm(found: SplitResults, panel: str, branch: str) -> ClaimResult:
    claim = Claim(
        id=f"update-norm-steady-{panel}",
        statement=f"The update step size changes little when SGD is exchanged for NGD ({panel}, {branch}).",
        source=SOURCE + " (a)",
        paper_value="changes little, no number",
        measure="‖Δw‖/lr, mean over the epochs after the split, over that of as many epochs before it; mean over "
        "seeds",
        criterion=Criterion(at_least=0.8, at_most=1.25, direction_at_least=0.5, direction_at_most=2.0),
    )
    values = found.by_seed(panel, branch, "update_norm_ratio")
    why = (
        found.all_branches(panel, "update_norm_ratio") + " SGD's own number shows what comes of further training."
    )
    return judge(claim, values.mean(), t_interval(values), if_not_reproduced=why)


def _fluctuation(found: SplitResults, panel: str, branch: str) -> ClaimResult:
    claim = Claim(
        id=f"update-norm-fluctuates-{panel}",
        statement="After the split the update step size of NGD tends to fluctuate while that of SGD is steady "
        f"({panel}, {branch}).",
        source=SOURCE,
        paper_value="fluctuates, no number",
        measure="standard deviation over epochs of the change of ln(‖Δw‖/lr) from one epoch to the next, NGD's "
        "over SGD's; mean over seeds",
        criterion=Criterion(at_least=1.0),
    )
    sgd, ngd = (found.by_seed(panel, name, "fluctuation") for name in ("sgd", branch))
    values = (ngd / sgd).dropna()
    if len(values) < 2:
        return out_of_reach(claim, "It needs three epochs after the split and two seeds.")
    why = found.all_branches(panel, "fluctuation")
    return judge(claim, values.mean(), t_interval(values), if_not_reproduced=why)


def _rises(found: SplitResults, panel: str, branch: str) -> ClaimResult:
    claim = Claim(
        id=f"llc-rises-{panel}",
        statement=f"The LLC of NGD steadily increases after the split ({panel}, {branch}).",
        source=SOURCE + " (b)",
        paper_value="steadily increases, no number",
        measure="slope of the LLC's least-squares line from the split on, LLC an epoch; mean over seeds",
        criterion=Criterion(at_least=0.0),
    )
    values = found.by_seed(panel, branch, "llc_slope")
    if len(values) < 2:
        return out_of_reach(claim, found.why_no_llc(panel, [branch]))
    why = found.all_branches(panel, "llc_slope")
    return judge(claim, values.mean(), t_interval(values), if_not_reproduced=why)


def _faster(found: SplitResults, panel: str, branch: str) -> ClaimResult:
    claim = Claim(
        id=f"llc-rises-faster-{panel}",
        statement="After the split the LLC of SGD is steady or increases more slowly than NGD's "
        f"({panel}, {branch}).",
        source=SOURCE + " (b)",
        paper_value="slower, no number",
        measure="slope of the LLC after the split, as in llc-rises, NGD's minus SGD's; mean over seeds",
        criterion=Criterion(at_least=0.0),
    )
    sgd, ngd = (found.by_seed(panel, name, "llc_slope") for name in ("sgd", branch))
    values = (ngd - sgd).dropna()
    if len(values) < 2:
        return out_of_reach(claim, found.why_no_llc(panel, ["sgd", branch]))
    why = found.all_branches(panel, "llc_slope", "train_loss_ratio")
    return judge(claim, values.mean(), t_interval(values), if_not_reproduced=why)
