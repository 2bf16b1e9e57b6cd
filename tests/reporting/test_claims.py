import math

import pytest

from curvlab.reporting import Claim, ClaimResult, Criterion, Interval, judge, out_of_reach


def claim(**bounds: float) -> Claim:
    return Claim("c", "LiSSA agrees.", "Fig. 1", None, "Pearson", Criterion(**bounds))


def between(low: float, high: float) -> Interval:
    return Interval(low, high, "t 95 %, 3 seeds", 3)


LOWER = {"at_least": 0.9, "direction_at_least": 0.0}
UPPER = {"at_most": 0.1, "direction_at_most": 1.0}
BOTH = {"at_least": 0.9, "at_most": 1.1, "direction_at_least": 0.5}


@pytest.mark.parametrize(
    ("bounds", "value", "low", "high", "verdict"),
    [
        (LOWER, 0.95, 0.9, 0.99, "reproduced"),  # bounds are inclusive
        (LOWER, 0.95, 0.89, 0.99, "direction only"),  # the value alone is not enough
        (LOWER, 0.95, 0.0, 0.99, "direction only"),
        (LOWER, 0.95, -0.01, 0.99, "not reproduced"),
        (LOWER, 0.5, 0.4, 0.6, "direction only"),
        (LOWER, -0.5, -0.6, -0.4, "not reproduced"),
        ({"at_least": 0.9}, 0.5, 0.4, 0.6, "not reproduced"),  # no direction stated, none granted
        (UPPER, 0.05, 0.01, 0.1, "reproduced"),
        (UPPER, 0.05, 0.01, 0.2, "direction only"),
        (UPPER, 0.05, 0.01, math.inf, "not reproduced"),
        (BOTH, 1.0, 0.9, 1.1, "reproduced"),
        (BOTH, 1.3, 1.2, 1.4, "direction only"),
        (BOTH, 0.45, 0.4, 0.5, "not reproduced"),
        (LOWER, 0.5, 0.95, 0.99, "direction only"),  # a bootstrap interval may miss its own value
    ],
)
def test_verdict_rule(bounds: dict, value: float, low: float, high: float, verdict: str) -> None:
    assert judge(claim(**bounds), value, between(low, high), if_not_reproduced="why").verdict == verdict


@pytest.mark.parametrize(
    ("value", "interval"),
    [
        (math.nan, between(0.95, 0.99)),
        (0.95, between(math.nan, 0.99)),
        (0.95, between(0.95, math.nan)),
        (None, None),
        (None, between(0.95, 0.99)),
    ],
)
@pytest.mark.parametrize("bounds", [LOWER, UPPER, BOTH, {"at_least": -math.inf}])
def test_missing_or_nan_is_never_reproduced(value: float | None, interval: Interval | None, bounds: dict) -> None:
    assert judge(claim(**bounds), value, interval, if_not_reproduced="why").verdict == "not reproduced"


def test_explanation_states_what_was_measured_and_why() -> None:
    failed = judge(claim(at_least=0.9), 0.5, between(0.25, 0.75), if_not_reproduced="Batch noise: see laptop+B.")
    assert failed.explanation == "Measured 0.5 (0.25 to 0.75); needed: at least 0.9. Batch noise: see laptop+B."
    assert judge(claim(at_least=0.9), 1, between(1, 1), if_not_reproduced="why").explanation == ""


def test_out_of_reach_keeps_the_reason() -> None:
    result = out_of_reach(claim(**LOWER), "Needs ImageNet.")
    assert (result.verdict, result.value, result.explanation) == ("out of reach", None, "Needs ImageNet.")


def test_refuses_failure_without_explanation() -> None:
    with pytest.raises(ValueError, match="needs an explanation: the reason, or the run"):
        out_of_reach(claim(**LOWER), "  ")
    # asked for before the verdict is known
    with pytest.raises(ValueError, match="say in if_not_reproduced what explains a failure"):
        judge(claim(**LOWER), 1.0, between(1, 1), if_not_reproduced="")


def test_says_that_one_repetition_gives_no_interval() -> None:
    result = judge(claim(**LOWER), 0.95, Interval(math.nan, math.nan, "1 point", 1), if_not_reproduced="Why.")
    assert result.verdict == "not reproduced"
    assert (
        result.explanation
        == "Measured 0.95 (no interval: 1 point); needed: at least 0.9 (direction: at least 0). Why."
    )


def test_refuses_value_without_interval() -> None:
    with pytest.raises(ValueError, match=r"value without an interval; use t_interval"):
        judge(claim(**LOWER), 1.0, None, if_not_reproduced="why")


def test_refuses_verdict_that_does_not_follow() -> None:
    with pytest.raises(ValueError, match="does not follow from its value and interval; let judge"):
        ClaimResult(claim(**LOWER), 0.5, between(0.4, 0.6), "reproduced")
    with pytest.raises(ValueError, match="'maybe' is not one of"):
        ClaimResult(claim(**LOWER), 0.5, between(0.4, 0.6), "maybe", "why")


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({}, "without one nothing can fail|without a bound nothing can fail"),
        ({"direction_at_least": 0.0}, "nothing can fail"),
        ({"at_least": 2.0, "at_most": 1.0}, "at_least=2 is above at_most=1; swap them"),
        ({"at_least": 0.5, "direction_at_least": 0.6}, "must be weaker than the full ones"),
        ({"at_most": 0.5, "direction_at_most": 0.4}, "must be weaker than the full ones"),
        ({"at_most": 0.5, "direction_at_least": 0.0}, "must be weaker than the full ones"),
    ],
)
def test_refuses_meaningless_criterion(bounds: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Criterion(**bounds)


def test_refuses_claim_that_cannot_be_checked() -> None:
    with pytest.raises(ValueError, match="needs a source; a reader must be able to check it"):
        Claim("c", "LiSSA agrees.", "", None, "Pearson", Criterion(at_least=0.9))


def test_criterion_reads_as_text() -> None:
    assert str(Criterion(**BOTH)) == "between 0.9 and 1.1 (direction: at least 0.5)"
    assert str(Criterion(at_most=0.1)) == "at most 0.1"
