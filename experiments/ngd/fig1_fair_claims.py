"""Fig. 1, claims of the fair comparison: does NGD lie above SGD at its own lr, and at equal training loss?"""

from __future__ import annotations

import pandas as pd

from curvlab.reporting import Claim, ClaimResult, Criterion, judge, out_of_reach, t_interval
from experiments.ngd.fig1_fair import EQUAL, MATCHED, QUANTITIES, TUNED, FairComparison

SOURCE = "Saghir et al. 2024, Sec. 3.1, Figs. 1 and 2, in a setting that the paper does not have"


def judge_fair(fair: FairComparison) -> list[ClaimResult]:
    """Judge the direction for each model, quantity (LLC, tr(H)) and setting; intervals are over seeds."""
    return [
        _higher(fair, str(model), quantity, setting)
        for model in fair.tuning.model.unique()
        for setting in (TUNED, MATCHED)
        for quantity in QUANTITIES
    ]


def _higher(fair: FairComparison, model: str, quantity: str, setting: str) -> ClaimResult:
    name, tuned = QUANTITIES[quantity], setting == TUNED
    key = model.lower().replace(", ", "-").replace(" ", "-")
    where = "each at the lr of its smallest validation loss" if tuned else "at one lr and equal training loss"
    over = "at the end" if tuned else "averaged over the training losses that both reach"
    claim = Claim(
        id=f"{quantity}-higher-{'tuned' if tuned else 'matched'}-{key}",
        statement=f"NGD solutions have a higher {name} than SGD solutions, {where} ({model}).",
        source=SOURCE,
        paper_value="higher, no number; at one learning rate",
        measure=f"{name} of NGD minus that of SGD, {over}, seed by seed, over SGD's mean; mean over seeds",
        criterion=Criterion(at_least=0.0),
    )
    values = fair.relative_differences(model, setting, quantity)
    if len(values) < 2:
        return out_of_reach(claim, _why_none(fair, model, quantity, tuned=tuned))
    why = _choices(fair.tuning, model) if tuned else _at_equal_epochs(fair, model, quantity)
    return judge(claim, values.mean(), t_interval(values), if_not_reproduced=why)


def _choices(tuning: pd.DataFrame, model: str) -> str:
    own = tuning[(tuning.model == model) & tuning.chosen]
    parts = [
        f"{str(name).upper()} takes lr {rows.lr.iloc[0]:g} and ends at a training loss of "
        f"{rows.train_loss.mean():.3g}"
        for name, rows in own.groupby("optimizer", sort=False)
    ]
    return f"{'; '.join(parts)}; settings.csv has the other settings."


def _at_equal_epochs(fair: FairComparison, model: str, quantity: str) -> str:
    values = fair.relative_differences(model, EQUAL, quantity)
    if not len(values):
        return "At equal epochs nothing can be compared, either (settings.csv)."
    return f"At equal lr and epochs the difference is {100 * values.mean():+.0f} % (settings.csv)."


def _why_none(fair: FairComparison, model: str, quantity: str, *, tuned: bool) -> str:
    if not tuned:
        return "Fewer than two seeds in which both optimizers reach a common training loss with valid estimates."
    own = fair.tuned[fair.tuned.model == model]
    if not {"sgd", "ngd"} <= set(own.optimizer):
        return "Training diverged at every learning rate of the grid."
    problems = ", ".join(own.problem.dropna().unique()) or "training has not converged"
    return f"Fewer than two seeds with both estimates ({problems if quantity == 'llc' else 'no trace'})."
