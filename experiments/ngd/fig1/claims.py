"""Fig. 1: the LLC of NGD lies above that of SGD at every width, and significantly so; and in other settings."""

from __future__ import annotations

import pandas as pd

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, exact, out_of_reach, t_interval
from curvlab.lab import judge as judge_claim
from experiments.ngd.fig1.cutoffs_claims import judge_cutoffs
from experiments.ngd.fig1.measures import relative_difference
from experiments.ngd.fig1.networks import network_name
from experiments.ngd.fig1.tuned_and_matched import EQUAL, MATCHED, QUANTITIES, TUNED, TunedAndMatched


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge each task (depth, LeNet-5) over its widths, then the networks of `tuned_and_matched` and `cutoffs`."""
    table, summary, settings = computed["table"], computed["summary"], computed["settings"]
    judged, results = computed.config["judged_optimizer"], []
    for task in summary.task.unique():
        named = [claims.claim(name, of=task) for name in ("llc-higher", "llc-significant", "llc-higher-raw")]
        own, its_summary, its_settings = (part[part.task == task] for part in (table, summary, settings))
        results += _judge_task(named, own, its_summary, its_settings, judged)
    found = TunedAndMatched.of(computed)
    results += [
        _higher(found, network, quantity, setting, claims)
        for network in found.networks()
        for setting in (TUNED, MATCHED)
        for quantity in QUANTITIES
    ]
    return results + judge_cutoffs(computed["cutoffs"], computed["cutoff_summary"], claims)


def _judge_task(
    claims: list[Claim], table: pd.DataFrame, summary: pd.DataFrame, settings: pd.DataFrame, judged: str
) -> list[ClaimResult]:
    """Judge direction, significance, and the direction from the trained weights; intervals are over seeds."""
    higher, significant, raw = claims
    own = summary[summary.optimizer == judged]
    lacking = own[own.p.isna()]
    if len(lacking):
        reason = f"No LLC at width {', '.join(map(str, lacking.width))}: {_why_none(table, judged)}"
        return [out_of_reach(claim, reason) for claim in claims]
    why = _by_width(summary, judged) + _losses(summary, judged) + _elsewhere(settings)
    difference, raw_difference = (relative_difference(table, judged, column) for column in ("llc", "llc_raw"))
    # The tests have two sides: a width at which the judged one is the lower one speaks against the claim.
    largest = float(own.p.where(own.difference > 0, 1.0).max())
    counts = summary[summary.optimizer.isin([judged, "sgd"])].llcs
    tests = exact(largest, kind=f"largest of {len(own)} tests, {counts.min()} to {counts.max()} seeds each")
    return [
        judge_claim(higher, *difference, if_not_reproduced=why),
        judge_claim(significant, largest, tests, if_not_reproduced=why),
        judge_claim(raw, *raw_difference, if_not_reproduced=why),
    ]


def _by_width(summary: pd.DataFrame, judged: str) -> str:
    """Return what each width alone says, with the seeds that have a valid LLC."""
    sgd, own = (summary[summary.optimizer == name].set_index("width") for name in ("sgd", judged))
    parts = [
        f"{f'width {width}: ' if width else ''}{100 * own.difference[width] / sgd.llc[width]:+.0f} % "
        f"(p = {own.p[width]:.2g}; {own.llcs[width]} and {sgd.llcs[width]} of {own.seeds[width]} seeds)"
        for width in own.index
    ]
    return f"{'; '.join(parts)}. "


def _why_none(table: pd.DataFrame, judged: str) -> str:
    own = table[table.optimizer.isin([judged, "sgd"]) & table.llc.isna()]
    if own.train_loss.isna().any():
        return "training diverged."
    if (~own.converged).any():
        return f"training has not converged (training loss {own.train_loss.max():.3g})."
    return f"the estimates are not valid ({own.problem.dropna().iloc[0]})."


def _losses(summary: pd.DataFrame, judged: str) -> str:
    losses = {name: summary[summary.optimizer == name].train_loss.mean() for name in (judged, "sgd")}
    widest = summary[summary.optimizer == judged].sort_values("p").iloc[-1]
    return (
        f"p is largest at width {widest.width}, where the LLCs of NGD lie within {widest.llc_low:.3g} to "
        f"{widest.llc_high:.3g} and their mean {widest.difference:.3g} above SGD's. "
        f"The training losses differ, {losses[judged]:.3g} (NGD) against {losses['sgd']:.3g} (SGD), and the LLC "
        "depends on them."
    )


def _elsewhere(settings: pd.DataFrame) -> str:
    """Return how NGD compares in the settings that the paper does not have."""
    own = settings[(settings.quantity == "llc") & settings.low.notna()]
    return "".join(
        f" {network_name(row.task, row.width)}, {row.setting}: {100 * row.relative_difference:+.0f} % "
        f"({100 * row.low:+.0f} to {100 * row.high:+.0f})."
        for _, row in own.iterrows()
    )


def _higher(
    found: TunedAndMatched, network: tuple[str, int], quantity: str, setting: str, claims: ClaimSheet
) -> ClaimResult:
    tuned = setting == TUNED
    claim = claims.claim(f"{quantity}-higher-{'tuned' if tuned else 'matched'}", of=network_name(*network))
    values = found.relative_differences(network, setting, quantity)
    if len(values) < 2:
        return out_of_reach(claim, _why_not(found, network, quantity, tuned=tuned))
    why = _choices(found, network) if tuned else _at_equal_epochs(found, network, quantity)
    return judge_claim(claim, values.mean(), t_interval(values), if_not_reproduced=why)


def _choices(found: TunedAndMatched, network: tuple[str, int]) -> str:
    tuning = found.at(found.tuning, network)
    parts = [
        f"{str(name).upper()} takes lr {rows.lr.iloc[0]:g} and ends at a training loss of "
        f"{rows.train_loss.mean():.3g}"
        for name, rows in tuning[tuning.chosen].groupby("optimizer", sort=False)
    ]
    return f"{'; '.join(parts)}; settings.csv has the other settings."


def _at_equal_epochs(found: TunedAndMatched, network: tuple[str, int], quantity: str) -> str:
    values = found.relative_differences(network, EQUAL, quantity)
    if not len(values):
        return "At equal epochs nothing can be compared, either (settings.csv)."
    return f"At equal lr and epochs the difference is {100 * values.mean():+.0f} % (settings.csv)."


def _why_not(found: TunedAndMatched, network: tuple[str, int], quantity: str, *, tuned: bool) -> str:
    if not tuned:
        return "Fewer than two seeds in which both optimizers reach a common training loss with valid estimates."
    own = found.at(found.tuned, network)
    if not {"sgd", "ngd"} <= set(own.optimizer):
        return "Training diverged at every learning rate of the grid."
    problems = ", ".join(own.problem.dropna().unique()) or "training has not converged"
    return f"Fewer than two seeds with both estimates ({problems if quantity == 'llc' else 'no trace'})."
