"""Claims of a paper, and the rule that turns a measurement into a verdict.

A target declares its claims beside its code and judges each of them once per run:

    MEDIAN = Claim(id="exact-agrees", statement="...", source="Klochkov & Liu 2024, Fig. 1", paper_value=None,
                   measure="median Pearson over training points", criterion=Criterion(at_least=0.99))
    result = judge(MEDIAN, value, interval, if_not_reproduced="The PBRF has not converged: see residuals.")

The rule. "The interval" means both of its ends, the value, and all between them (a bootstrap interval may miss
its own value). The first line that applies gives the verdict:

    ==============  =========================================================================================
    out of reach    there is no value; the explanation says why
    not asked here  it is an interval over fewer than three values, whatever its ends, and not of what no other
                    seed would change: a theorem, a count, a printed number (`Interval.has_too_few_samples`)
    undecided       the value or an end is nan
    reproduced      the whole interval satisfies the criterion
    refuted         the criterion is of an exact statement, and so is the value (low == value == high): the
                    explanation gives the counter-example
    direction only  the whole interval satisfies the weaker criterion for the direction
    not reproduced  the whole interval lies outside the criterion; the direction may still be open
    undecided       anything else: part of the interval keeps the criterion, part of it does not
    not asked here  instead of undecided, where no more was to be expected: the interval that was forecast, from
                    the first two seeds or from the errors of single estimates, lies on both sides of a bound, too
    ==============  =========================================================================================

A claim stands at a preset that can decide it. The forecast can only take out what came out undecided; what a run
decides stands, whatever was forecast, so that no failure is hidden. But its two seeds are the run's own, and it
lessens the number of undecided claims: headlines count what it takes out as undecided, results/REPRODUCE.md does
so apart. Until 2026-11-26 a missed criterion whose direction is open was undecided, and so could be not asked
here: the sheets say where that changed a verdict. Bounds are inclusive. A preset may also call a claim out of
reach that it has a value for, with the reason; and a sheet may say beforehand what a preset cannot decide (see
`claim_sheet`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from curvlab.lab.claims.intervals import MIN_SAMPLES, Interval

REPRODUCED = "reproduced"
DIRECTION_ONLY = "direction only"
UNDECIDED = "undecided"
NOT_REPRODUCED = "not reproduced"
REFUTED = "refuted"
OUT_OF_REACH = "out of reach"
NOT_ASKED = "not asked here"
VERDICTS = (REPRODUCED, DIRECTION_ONLY, UNDECIDED, NOT_REPRODUCED, REFUTED, OUT_OF_REACH, NOT_ASKED)
UNJUDGED = (OUT_OF_REACH, NOT_ASKED)


def is_ours(source: str) -> bool:
    """Whether a claim of this source is no paper's: it begins with "ours"; or with "curvlab", of a benchmark."""
    return source.startswith(("ours", "curvlab"))


@dataclass(frozen=True)
class Criterion:
    """Bounds (inclusive) that the whole interval must keep, and weaker ones that still show the direction.

    Args:
        at_least: lower bound of a reproduced value; None for no such bound.
        at_most: upper bound of a reproduced value; both together mean "between".
        direction_at_least: lower bound of "direction only".
        direction_at_most: upper bound of "direction only".
        exact: the claim is a statement without exceptions (a theorem, an identity, a printed number), so that one
            exact value that fails refutes it.
    """

    at_least: float | None = None
    at_most: float | None = None
    direction_at_least: float | None = None
    direction_at_most: float | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        if self.at_least is None and self.at_most is None:
            raise ValueError("a criterion needs at_least, at_most, or both; without a bound nothing can fail.")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(f"at_least={self.at_least:g} is above at_most={self.at_most:g}; swap them.")
        stricter_low = self.direction_at_least is not None and (
            self.at_least is None or self.direction_at_least > self.at_least
        )
        stricter_high = self.direction_at_most is not None and (
            self.at_most is None or self.direction_at_most < self.at_most
        )
        if stricter_low or stricter_high:
            raise ValueError(
                f"the bounds for the direction must be weaker than the full ones, got {self}; "
                "lower direction_at_least or raise direction_at_most."
            )

    def holds(self, values: Iterable[float]) -> bool:
        """Return whether all values keep the full bounds; a nan never does."""
        return _within(values, self.at_least, self.at_most)

    def shows_direction(self, values: Iterable[float]) -> bool:
        """Return whether all values keep the weaker bounds; False when none are stated."""
        return self.states_direction and _within(values, self.direction_at_least, self.direction_at_most)

    def misses(self, values: Iterable[float]) -> bool:
        """Return whether no number from the least to the largest of the values keeps the full bounds."""
        return _outside(values, self.at_least, self.at_most)

    def leaves_direction_open(self, values: Iterable[float]) -> bool:
        """Return whether of these values some keep the weaker bounds and some do not."""
        return self.states_direction and not _outside(values, self.direction_at_least, self.direction_at_most)

    @property
    def states_direction(self) -> bool:
        """Whether there are weaker bounds for the direction."""
        return self.direction_at_least is not None or self.direction_at_most is not None

    def __str__(self) -> str:
        text = _bounds_text(self.at_least, self.at_most)
        if self.exact:
            text += ", without exception"
        if not self.states_direction:
            return text
        return f"{text} (direction: {_bounds_text(self.direction_at_least, self.direction_at_most)})"


@dataclass(frozen=True)
class Change:
    """A change of a claim's criterion or measure after results were seen.

    Args:
        date: "2026-11-20".
        what: what was changed, and why.
    """

    date: str
    what: str


@dataclass(frozen=True)
class Claim:
    """One checkable sentence of a paper.

    Args:
        id: short and unique within its target, e.g. "lissa-agrees".
        statement: what the paper says, in our words.
        source: where it stands, e.g. "Klochkov & Liu 2024, Sec. 4, Fig. 1".
        paper_value: the paper's number, or what it shows in words, or None when it states neither.
        measure: how our value is measured.
        criterion: when it counts as reproduced.
        changed: what was changed of it after results were seen.
        words: what the entry of its sheet was filled with.
    """

    id: str
    statement: str
    source: str
    paper_value: float | str | None
    measure: str
    criterion: Criterion
    changed: tuple[Change, ...] = ()
    words: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def is_ours(self) -> bool:
        """Whether the paper does not make it, see `is_ours`."""
        return is_ours(self.source)

    def __post_init__(self) -> None:
        for name in ("id", "statement", "source", "measure"):
            if not getattr(self, name).strip():
                raise ValueError(f"claim {self.id!r} needs a {name}; a reader must be able to check it.")


@dataclass(frozen=True)
class ClaimResult:
    """A claim with what was measured and what follows from it.

    Args:
        claim: the claim.
        value: the measured value; None when nothing was measured.
        interval: where the value lies; None when nothing was measured.
        verdict: one of `VERDICTS`.
        explanation: why, and which run shows it; empty only when the claim is reproduced.
    """

    claim: Claim
    value: float | None
    interval: Interval | None
    verdict: str
    explanation: str = ""

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"claim {self.claim.id!r}: verdict {self.verdict!r} is not one of {VERDICTS}.")
        if self.verdict != REPRODUCED and not self.explanation.strip():
            raise ValueError(
                f"claim {self.claim.id!r} is {self.verdict!r} and needs an explanation: "
                "the reason, or the run that shows it."
            )
        follows = decide(self.value, self.interval, self.claim.criterion)
        if self.verdict not in (*UNJUDGED, follows):
            raise ValueError(
                f"claim {self.claim.id!r}: {self.verdict!r} does not follow from its value and interval; "
                "let judge() decide."
            )

    @property
    def weighed(self) -> str:
        """The verdict in a headline, where what was measured and not asked for want of power is undecided.

        A value of fewer than three seeds is shown and stays not asked, there as elsewhere.
        """
        measured = self.interval is not None and not self.interval.has_too_few_samples
        powerless = self.verdict == NOT_ASKED and measured and self.explanation.startswith("Measured ")
        return UNDECIDED if powerless else self.verdict


def decide(value: float | None, interval: Interval | None, criterion: Criterion) -> str:
    """Return the verdict on a measured value: the rule at the head of this module, and nothing else."""
    if value is None or interval is None:
        return OUT_OF_REACH
    if interval.has_too_few_samples:
        return NOT_ASKED
    verdict = _verdict((interval.low, value, interval.high), criterion)
    if verdict != UNDECIDED or interval.forecast is None:
        return verdict
    return NOT_ASKED if _verdict(interval.forecast, criterion) == UNDECIDED else UNDECIDED


def _verdict(measured: tuple[float, ...], criterion: Criterion) -> str:
    """Return the verdict on a value with the ends of its interval, or on the ends alone."""
    if any(math.isnan(end) for end in measured):
        return UNDECIDED
    if criterion.holds(measured):
        return REPRODUCED
    if criterion.exact and len(set(measured)) == 1:
        return REFUTED
    if criterion.shows_direction(measured):
        return DIRECTION_ONLY
    return NOT_REPRODUCED if criterion.misses(measured) else UNDECIDED


def describe(value: float | None, interval: Interval | None, criterion: Criterion) -> str:
    """Return in a sentence or two what was measured, what was needed and, when undecided, what is in the way."""
    if value is None or interval is None:
        return "Not measured."
    spread = f"{interval.low:.4g} to {interval.high:.4g}"
    if math.isnan(interval.low) and math.isnan(interval.high):
        spread = f"no interval: {interval.kind}"
    fact = f"Measured {value:.4g} ({spread}); needed: {criterion}."
    verdict = decide(value, interval, criterion)
    measured = (interval.low, value, interval.high)
    if verdict == NOT_REPRODUCED and criterion.leaves_direction_open(measured):
        return f"{fact} The direction is open."
    if verdict not in (UNDECIDED, NOT_ASKED):
        return fact
    if interval.has_too_few_samples:
        return f"{fact} Fewer than {MIN_SAMPLES} {_unit(interval)} decide nothing."
    if any(math.isnan(end) for end in measured):
        return f"{fact} Without numbers at both ends nothing is decided."
    fact += " The interval lies on both sides of a bound."
    if verdict == UNDECIDED or interval.forecast is None:
        return fact
    low, high = interval.forecast
    expected = f"{interval.num_samples} values with the spread of the first two would"
    if not interval.kind.startswith("t "):
        expected = "were the claim true, the interval would"
    return f"{fact} No more was to be expected: {expected} reach from {low:.4g} to {high:.4g}."


def _unit(interval: Interval) -> str:
    return "seeds" if "seed" in interval.kind else "values"


def judge(claim: Claim, value: float | None, interval: Interval | None, *, if_not_reproduced: str) -> ClaimResult:
    """Return the claim's verdict on `value` and its interval, both to ten digits.

    Args:
        claim: the claim.
        value: what was measured; None when the run did not give it, which makes the claim out of reach.
        interval: from `t_interval`, `bootstrap_interval` or `exact`; None only without a value.
        if_not_reproduced: the reason to give should the claim not be reproduced, the run that shows it, or the
            counter-example. Asked for in any case, so that a missing one is noticed before the run that needs it.
    """
    if not if_not_reproduced.strip():
        raise ValueError(f"claim {claim.id!r}: say in if_not_reproduced what explains a failure.")
    if value is not None and interval is None:
        raise ValueError(
            f"claim {claim.id!r} has a value without an interval; use t_interval, bootstrap_interval, "
            "or exact(value) for one that no repetition would change."
        )
    value = None if value is None else _rounded(value)
    if interval is not None:
        forecast = interval.forecast and (_rounded(interval.forecast[0]), _rounded(interval.forecast[1]))
        interval = replace(interval, low=_rounded(interval.low), high=_rounded(interval.high), forecast=forecast)
    verdict = decide(value, interval, claim.criterion)
    if verdict == REPRODUCED:
        return ClaimResult(claim, value, interval, verdict)
    fact = describe(value, interval, claim.criterion)
    return ClaimResult(claim, value, interval, verdict, f"{fact} {if_not_reproduced.strip()}")


def _rounded(number: float) -> float:
    """Return ten significant digits: sums in another order, on another machine, give the same claims."""
    return float(f"{float(number):.10g}")


def out_of_reach(claim: Claim, reason: str) -> ClaimResult:
    """Return the claim as one that this preset cannot check, with the reason."""
    return ClaimResult(claim, None, None, OUT_OF_REACH, reason)


def withheld(result: ClaimResult, reason: str) -> ClaimResult:
    """Return the result as out of reach with what was measured, where there is a reason; "" leaves it as it is."""
    if not reason:
        return result
    return replace(result, verdict=OUT_OF_REACH, explanation=f"{reason} {result.explanation}".strip())


def not_asked(result: ClaimResult, reason: str) -> ClaimResult:
    """Return a claim out of reach as one whose reason was known beforehand; one that was judged as it is."""
    if result.verdict != OUT_OF_REACH:
        return result
    return replace(result, verdict=NOT_ASKED, explanation=f"{reason.strip()} {result.explanation}".strip())


def _outside(values: Iterable[float], low: float | None, high: float | None) -> bool:
    values = tuple(values)
    if any(math.isnan(value) for value in values):
        return False
    return (low is not None and max(values) < low) or (high is not None and min(values) > high)


def _within(values: Iterable[float], low: float | None, high: float | None) -> bool:
    return all(
        not math.isnan(value) and (low is None or value >= low) and (high is None or value <= high)
        for value in values
    )


def _bounds_text(low: float | None, high: float | None) -> str:
    if low is None:
        return f"at most {high:g}"
    if high is None:
        return f"at least {low:g}"
    return f"between {low:g} and {high:g}"
