"""Fig. 6, claims: a raised SGD learning rate brings larger steps and lower losses, but no larger LLC."""

from __future__ import annotations

from curvlab.reporting import Claim, ClaimResult, Criterion, judge, out_of_reach, t_interval
from experiments.ngd.split_measures import SplitResults

SOURCE = "Saghir et al. 2024, Sec. 3.3, Fig. 6"


def judge_claims(found: SplitResults, *, claimed: dict[str, str]) -> list[ClaimResult]:
    """Judge each panel's claimed branch, SGD at the raised learning rate."""
    results = []
    for panel, branch in claimed.items():
        results += [
            _step_rises(found, panel, branch),
            _step_falls_then(found, panel, branch),
            _llc(found, panel, branch),
            _loss(found, panel, branch, "train"),
            _loss(found, panel, branch, "validation"),
        ]
    return results


def _step_rises(found: SplitResults, panel: str, branch: str) -> ClaimResult:
    claim = Claim(
        id=f"step-rises-{panel}",
        statement=f"The update step size of SGD rises sharply with its learning rate ({panel}).",
        source=SOURCE + " (a)",
        paper_value="rises sharply, no number",
        measure="‖Δw‖ (learning rate included), mean over the epochs after the split, over that of as many epochs "
        "before; mean over seeds",
        criterion=Criterion(at_least=5.0, direction_at_least=1.0),
    )
    values = found.by_seed(panel, branch, "step_norm_ratio")
    # The paper defines the step size as ‖∇L‖, which does not contain the learning rate.
    without = found.all_branches(panel, "update_norm_ratio")
    why = f"{found.all_branches(panel, 'step_norm_ratio')} Without the learning rate: {without}"
    return judge(claim, values.mean(), t_interval(values), if_not_reproduced=why)


def _step_falls_then(found: SplitResults, panel: str, branch: str) -> ClaimResult:
    claim = Claim(
        id=f"step-decreases-{panel}",
        statement=f"After it has risen, the update step size of SGD steadily decreases ({panel}).",
        source=SOURCE + " (a)",
        paper_value="decreases, no number",
        measure="‖Δw‖ of the last epoch over that of the first after the split; mean over seeds",
        criterion=Criterion(at_most=1.0),
    )
    own = found.table[(found.table.panel == panel) & (found.table.branch == branch)].sort_values("epoch")
    by_seed = own.groupby("seed").step_norm
    values = by_seed.last() / by_seed.first()
    why = "The batches' gradients do not shrink together with the loss at this learning rate: see the figure."
    return judge(claim, values.mean(), t_interval(values), if_not_reproduced=why)


def _llc(found: SplitResults, panel: str, branch: str) -> ClaimResult:
    claim = Claim(
        id=f"llc-does-not-increase-{panel}",
        statement=f"The LLC of SGD does not increase although its learning rate is raised ({panel}).",
        source=SOURCE + " (b)",
        paper_value="does not increase, no number",
        measure="slope of the LLC's least-squares line from the split on, times the epochs, over the "
        "seeds' mean LLC at the split; mean over seeds; up to 0.1 counts as none",
        criterion=Criterion(at_most=0.1),
    )
    values = found.by_seed(panel, branch, "llc_change")
    if len(values) < 2:
        return out_of_reach(claim, found.why_no_llc(panel, [branch]))
    why = found.all_branches(panel, "llc_change", "train_loss_ratio")
    if values.mean() <= 0.1:
        why = f"It does not on average; {len(values)} seeds are too few to tell. {why}"
    return judge(claim, values.mean(), t_interval(values), if_not_reproduced=why)


def _loss(found: SplitResults, panel: str, branch: str, which: str) -> ClaimResult:
    name = {"train": "training", "validation": "validation"}[which]
    claim = Claim(
        id=f"{name}-loss-falls-{panel}",
        statement=f"The larger step size makes the {name} loss of SGD decrease sharply ({panel}).",
        source=SOURCE + ", text",
        paper_value="sharply, no number",
        measure=f"{name} loss at the end over that at the split; mean over seeds",
        criterion=Criterion(at_most=0.5, direction_at_most=1.0),
    )
    values = found.by_seed(panel, branch, f"{which}_loss_ratio")
    why = found.all_branches(panel, f"{which}_loss_ratio")
    return judge(claim, values.mean(), t_interval(values), if_not_reproduced=why)
