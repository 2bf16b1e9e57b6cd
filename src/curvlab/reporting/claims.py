"""Claims of a paper, and the rule that turns a measurement into a verdict.

A target declares its claims beside its code and judges each of them once per run:

    MEDIAN = Claim(id="exact-agrees", statement="...", source="Klochkov & Liu 2024, Fig. 1", paper_value=None,
                   measure="median Pearson over training points", criterion=Criterion(at_least=0.99))
    result = judge(MEDIAN, value, interval, if_not_reproduced="The PBRF has not converged: see residuals.")

The rule: a claim is reproduced when the value and both ends of its interval satisfy the criterion. It is
"direction only" when they satisfy the weaker criterion for the direction, but not the full one. Anything
else, a missing value, and a nan anywhere, is not reproduced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from curvlab.reporting.intervals import Interval

REPRODUCED = "reproduced"
DIRECTION_ONLY = "direction only"
NOT_REPRODUCED = "not reproduced"
OUT_OF_REACH = "out of reach"
VERDICTS = (REPRODUCED, DIRECTION_ONLY, NOT_REPRODUCED, OUT_OF_REACH)


@dataclass(frozen=True)
class Criterion:
    """Bounds (inclusive) that the whole interval must keep, and weaker ones that still show the direction.

    Args:
        at_least: lower bound of a reproduced value; None for no such bound.
        at_most: upper bound of a reproduced value; both together mean "between".
        direction_at_least: lower bound of "direction only".
        direction_at_most: upper bound of "direction only".
    """

    at_least: float | None = None
    at_most: float | None = None
    direction_at_least: float | None = None
    direction_at_most: float | None = None

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
        if self.direction_at_least is None and self.direction_at_most is None:
            return False
        return _within(values, self.direction_at_least, self.direction_at_most)

    def __str__(self) -> str:
        text = _bounds_text(self.at_least, self.at_most)
        if self.direction_at_least is None and self.direction_at_most is None:
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
    """

    id: str
    statement: str
    source: str
    paper_value: float | str | None
    measure: str
    criterion: Criterion
    changed: tuple[Change, ...] = ()

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
        if self.verdict not in (OUT_OF_REACH, follows):
            raise ValueError(
                f"claim {self.claim.id!r}: {self.verdict!r} does not follow from its value and interval; "
                "let judge() decide."
            )


def decide(value: float | None, interval: Interval | None, criterion: Criterion) -> str:
    """Return the verdict on a measured value: the rule at the head of this module, and nothing else."""
    if value is None or interval is None:
        return NOT_REPRODUCED
    measured = (interval.low, value, interval.high)
    if criterion.holds(measured):
        return REPRODUCED
    return DIRECTION_ONLY if criterion.shows_direction(measured) else NOT_REPRODUCED


def judge(claim: Claim, value: float | None, interval: Interval | None, *, if_not_reproduced: str) -> ClaimResult:
    """Return the claim's verdict on `value` and its interval.

    Args:
        claim: the claim.
        value: what was measured; None when the run did not give it.
        interval: from `t_interval`, `bootstrap_interval` or `exact`; None only without a value.
        if_not_reproduced: the reason to give should the claim fail, or the run that shows it. Asked for in
            any case, so that a missing one is noticed before the run that needs it.
    """
    if not if_not_reproduced.strip():
        raise ValueError(f"claim {claim.id!r}: say in if_not_reproduced what explains a failure.")
    if value is not None and interval is None:
        raise ValueError(
            f"claim {claim.id!r} has a value without an interval; use t_interval, bootstrap_interval, "
            "or exact(value) for one that no repetition would change."
        )
    value = None if value is None else float(value)
    verdict = decide(value, interval, claim.criterion)
    if verdict == REPRODUCED:
        return ClaimResult(claim, value, interval, verdict)
    if value is None or interval is None:
        fact = "Not measured."
    else:
        spread = f"{interval.low:.4g} to {interval.high:.4g}"
        if math.isnan(interval.low) and math.isnan(interval.high):
            spread = f"no interval: {interval.kind}"
        fact = f"Measured {value:.4g} ({spread}); needed: {claim.criterion}."
    return ClaimResult(claim, value, interval, verdict, f"{fact} {if_not_reproduced.strip()}")


def out_of_reach(claim: Claim, reason: str) -> ClaimResult:
    """Return the claim as one that this preset cannot check, with the reason."""
    return ClaimResult(claim, None, None, OUT_OF_REACH, reason)


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
