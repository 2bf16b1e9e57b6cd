"""Figs. 7 and 8, claims: past the minimum of the validation loss LLC, tr(H) and WBIC increase."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.reporting import Claim, ClaimResult, Criterion, judge, out_of_reach, t_interval

SOURCE = "Saghir et al. 2024, App. A.3"
NAMES = {"llc": "LLC", "trace": "Hessian trace", "wbic": "WBIC"}
OVERFITS = 0.1  # relative rise of the validation loss that reproduces overfitting
RISES = 0.02  # from which a seed counts among those that overfit, in what is said of them


def judge_fig7(since: pd.DataFrame) -> list[ClaimResult]:
    """Judge for SGD and NGD that they overfit, and that LLC and tr(H) increase meanwhile."""
    results = []
    for optimizer in ("sgd", "ngd"):
        results += [_overfits(since, optimizer, "Fig. 7")]
        results += [_increases(since, optimizer, quantity, "Fig. 7") for quantity in ("llc", "trace")]
    return results


def judge_fig8(since: pd.DataFrame, table: pd.DataFrame) -> list[ClaimResult]:
    """Judge for NGD that it overfits, that its WBIC increases, and with the validation loss."""
    terms = _terms(table)
    return [
        _overfits(since, "ngd", "Fig. 8"),
        _increases(since, "ngd", "wbic", "Fig. 8", terms),
        _follows_validation_loss(since, terms),
    ]


def _overfits(since: pd.DataFrame, optimizer: str, figure: str) -> ClaimResult:
    claim = Claim(
        id=f"overfits-{optimizer}",
        statement=f"Trained for too long, {optimizer.upper()} overfits: its validation loss rises.",
        source=f"{SOURCE}, {figure}",
        paper_value="rises, no number",
        measure="validation loss at the end over its minimum (of the checkpoints) minus 1, mean over seeds",
        criterion=Criterion(at_least=OVERFITS, direction_at_least=RISES),
    )
    values = _rows(since, optimizer, "validation_loss").change.fillna(0.0).to_numpy()
    why = "Train for more epochs, on fewer examples, or with more label noise."
    return judge(claim, values.mean(), t_interval(values), if_not_reproduced=why)


def _increases(since: pd.DataFrame, optimizer: str, quantity: str, figure: str, more: str = "") -> ClaimResult:
    name = NAMES[quantity]
    which = "" if quantity == "trace" else " with a valid estimate"
    claim = Claim(
        id=f"{quantity}-increases-{optimizer}",
        statement=f"While {optimizer.upper()} overfits, the {name} increases.",
        source=f"{SOURCE}, {figure}",
        paper_value="increases, no number",
        measure=f"{name} at the last checkpoint{which} over that at the first one from the minimum of the "
        f"validation loss on, minus 1; mean over seeds whose validation loss rises by {RISES:.0%} (first set to "
        f"{OVERFITS:.0%}, which NGD does not reach on FashionMNIST, and lowered then)",
        criterion=Criterion(at_least=0.0),
    )
    used = _rows(since, optimizer, quantity).dropna(subset="change")
    if (lacking := _lacking(since, optimizer, used)) is not None:
        return out_of_reach(claim, lacking)
    sampled = used.sampled_change.dropna().to_numpy()
    why = (
        f"It goes from {used['first'].mean():.4g} to {used['last'].mean():.4g}, {_from_to(used)}, while the "
        f"training loss goes from {used.train_loss_first.mean():.3g} to {used.train_loss_last.mean():.3g}: the "
        "curvature of the cross-entropy vanishes where that nears zero."
    )
    if quantity != "trace" and len(sampled) > 1:
        every = t_interval(sampled)
        why += (
            f" With every estimate, valid or not, as in the paper: {sampled.mean():+.2f} "
            f"({every.low:+.2f} to {every.high:+.2f})."
        )
    values = used.change.to_numpy()
    return judge(claim, values.mean(), t_interval(values), if_not_reproduced=f"{why} {more}")


def _follows_validation_loss(since: pd.DataFrame, terms: str) -> ClaimResult:
    claim = Claim(
        id="wbic-follows-validation-loss-ngd",
        statement="The WBIC increases with the validation loss on a model overfitted by NGD.",
        source=f"{SOURCE}, Fig. 8",
        paper_value="increases, no number",
        measure="Spearman's correlation of WBIC and validation loss over the checkpoints with valid estimates "
        "from the minimum of the validation loss on; mean over seeds that overfit",
        criterion=Criterion(at_least=0.0),
    )
    used = _rows(since, "ngd", "wbic").dropna(subset="rank_correlation")
    if (lacking := _lacking(since, "ngd", used)) is not None:
        return out_of_reach(claim, lacking)
    values = used.rank_correlation.to_numpy()
    return judge(claim, values.mean(), t_interval(values), if_not_reproduced=terms)


def _rows(since: pd.DataFrame, optimizer: str, quantity: str) -> pd.DataFrame:
    """Return the rows of a quantity; of other than the validation loss, of the seeds that overfit."""
    own = since[since.optimizer == optimizer]
    if quantity == "validation_loss":
        return own[own.quantity == quantity]
    rises = own[own.quantity == "validation_loss"]
    overfitted = rises[rises.change >= RISES].seed
    return own[(own.quantity == quantity) & own.seed.isin(overfitted)]


def _lacking(since: pd.DataFrame, optimizer: str, used: pd.DataFrame) -> str | None:
    if len(used) > 1:
        return None
    rises = _rows(since, optimizer, "validation_loss").change
    return (
        f"{int((rises >= RISES).sum())} of {len(rises)} seeds overfit, {len(used)} of them with enough valid "
        "estimates from the minimum of the validation loss on; two are needed."
    )


def _from_to(used: pd.DataFrame) -> str:
    return f"epochs {used.first_epoch.mean():.0f} to {used.last_epoch.mean():.0f} (means over {len(used)} seeds)"


def _terms(table: pd.DataFrame) -> str:
    """Return how the two terms of WBIC = n L(w*) + LLC ln n change under NGD, from the minimum to the end."""
    fits, complexities = [], []
    for _, own in table[table.optimizer == "ngd"].groupby("seed"):
        ordered = own.sort_values("epoch")
        ends = ordered.loc[[ordered.validation_loss.idxmin(), ordered.index[-1]]]
        fit, complexity = (ends.num_train * ends.train_loss).to_numpy(), wbic_complexity(ends).to_numpy()
        fits.append(fit[1] - fit[0])
        complexities.append(complexity[1] - complexity[0])
    return (
        f"From the minimum of the validation loss to the end n L(w*) changes by {np.mean(fits):+.4g} nats, and "
        f"LLC ln n by {np.mean(complexities):+.4g} (every estimate, valid or not): their sum is the WBIC."
    )


def wbic_complexity(table: pd.DataFrame) -> pd.Series:
    """Return WBIC - n L(w*), nats: LLC ln n."""
    return table.wbic - table.num_train * table.train_loss
