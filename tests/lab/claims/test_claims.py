import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from curvlab.lab.claims import (
    Claim,
    ClaimResult,
    Criterion,
    Interval,
    bootstrap_interval,
    exact,
    judge,
    out_of_reach,
    t_interval,
)
from curvlab.lab.claims.claim_sheet import load_claims, rerun_command, save_claims
from curvlab.lab.claims.claims import VERDICTS, decide, describe, not_asked
from tests.refusals import refuses


def claim(**bounds: float | bool) -> Claim:
    return Claim("c", "LiSSA agrees.", "Fig. 1", None, "Pearson", Criterion(**bounds))


def between(low: float, high: float) -> Interval:
    return Interval(low, high, "t 95 %, 3 seeds", 3)


LOWER = {"at_least": 0.9, "direction_at_least": 0.0}
UPPER = {"at_most": 0.1, "direction_at_most": 1.0}
BOTH = {"at_least": 0.9, "at_most": 1.1, "direction_at_least": 0.5}


@pytest.mark.parametrize(
    ("bounds", "value", "low", "high", "verdict"),
    [  # beside the grid below: inclusive bounds, infinite ends, a bootstrap interval that misses its own value
        (LOWER, 0.95, 0.9, 0.99, "reproduced"),
        (LOWER, 0.95, 0.0, 0.99, "direction only"),
        (LOWER, 0.5, 0.95, 0.99, "direction only"),
        (UPPER, 0.05, 0.01, math.inf, "undecided"),
        (UPPER, math.inf, 2.0, math.inf, "not reproduced"),
        (LOWER, 0.3, -0.1, 0.7, "not reproduced"),  # in size, and in direction nothing is shown
        (LOWER, 0.3, -0.1, 0.95, "undecided"),
        ({"at_least": 0.9}, 0.95, 0.5, 0.6, "undecided"),
    ],
)
def test_verdict_rule(bounds: dict, value: float, low: float, high: float, verdict: str) -> None:
    assert judge(claim(**bounds), value, between(low, high), if_not_reproduced="why").verdict == verdict


def held(criterion: Criterion, x: float, *, direction: bool) -> bool:
    low, high = criterion.at_least, criterion.at_most
    if direction:
        low, high = criterion.direction_at_least, criterion.direction_at_most
        if low is None and high is None:
            return False
    return (low is None or low <= x) and (high is None or x <= high)


def oracle(value: float, low: float, high: float, criterion: Criterion) -> str:
    """The rule, point by point: ends lie on a grid of 1, bounds at halves, so steps of 1/4 see every change."""
    points = np.arange(min(low, value), max(high, value) + 0.1, 0.25)
    full = {held(criterion, x, direction=False) for x in points}
    direction = {held(criterion, x, direction=True) for x in points}
    if full == {True}:
        return "reproduced"
    if criterion.exact and low == value == high:
        return "refuted"
    if direction == {True}:
        return "direction only"
    return "not reproduced" if full == {False} else "undecided"


def criteria() -> list[Criterion]:
    bounds = [None, -1.5, -0.5, 0.5, 1.5]
    found = []
    for at_least, at_most, low, high in itertools.product(bounds, repeat=4):
        for is_exact in (False, True):
            try:
                found.append(Criterion(at_least, at_most, low, high, is_exact))
            except ValueError:
                continue
    return found


def test_rule_agrees_with_a_check_of_every_point() -> None:
    found: Counter[str] = Counter()
    for criterion in criteria():
        for low, high in itertools.combinations_with_replacement(range(-3, 4), 2):
            for value in {low, high, (low + high) // 2, 0}:
                verdict = decide(value, between(low, high), criterion)
                assert verdict == oracle(value, low, high, criterion), (value, low, high, criterion)
                found[verdict] += 1
    assert set(found) == set(VERDICTS) - {"out of reach", "not asked here"}


def test_a_narrower_interval_never_turns_one_decision_into_another() -> None:
    stays = {"reproduced": {"reproduced"}, "not reproduced": {"not reproduced", "direction only"}}
    for criterion in criteria():
        for low, high in itertools.combinations(range(-3, 4), 2):
            wide = decide(low, between(low, high), criterion)
            narrow = decide(low, between(low, high - 0.5), criterion)
            if wide in stays and not criterion.exact:
                assert narrow in stays[wide]


def test_moving_a_value_along_the_axis_meets_the_verdicts_in_order() -> None:
    criterion = Criterion(**LOWER)
    met = [decide(x, between(x - 0.1, x + 0.1), criterion) for x in np.linspace(-0.5, 1.5, 201)]
    assert [verdict for verdict, _ in itertools.groupby(met)] == ["not reproduced", "direction only", "reproduced"]


@pytest.mark.parametrize(
    ("value", "interval"),
    [
        (math.nan, between(0.95, 0.99)),
        (0.95, between(math.nan, 0.99)),
        (0.95, between(0.95, math.nan)),
        (0.95, between(math.nan, math.nan)),
        (0.95, t_interval([0.94, 0.96])),  # two seeds
        (-5.0, t_interval([-5.0, -5.0])),
        (0.95, t_interval([0.95])),
    ],
)
@pytest.mark.parametrize("bounds", [LOWER, UPPER, BOTH, {"at_least": -math.inf}, {"at_least": 0.9, "exact": True}])
def test_no_number_or_too_few_seeds_decide_nothing(value: float, interval: Interval, bounds: dict) -> None:
    result = judge(claim(**bounds), value, interval, if_not_reproduced="why")
    assert result.verdict == ("not asked here" if interval.has_too_few_samples else "undecided")
    assert re.search(r"(nothing is decided|seeds decide nothing)\. why$", result.explanation)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([0.5, 0.9, 0.7], "not asked here"),  # spread of the first two: 0.7 ± 0.7, which decides as little
        ([0.7, 0.71, 0.2], "undecided"),  # they promised 0.705 ± 0.02
        ([0.1, 1.3, *[0.7] * 8], "direction only"),  # they promised 0.7 ± 0.6; all ten decide, and that stands
        ([0.95, 0.95, 0.95], "reproduced"),
        ([0.1, 0.5, 0.3], "not reproduced"),  # its direction was not to be expected, but the criterion is missed
    ],
)
def test_what_two_seeds_could_not_promise_is_not_asked(values: list[float], verdict: str) -> None:
    interval = t_interval(values)
    result = judge(claim(at_least=0.9, direction_at_least=0.3), np.mean(values), interval, if_not_reproduced="why")
    assert result.verdict == verdict
    assert ("No more was to be expected" in result.explanation) == (verdict == "not asked here")


def test_what_was_known_to_be_out_of_reach_is_not_asked_and_what_was_judged_stands() -> None:
    refuses("needs an explanation: the reason, or the run", out_of_reach, claim(**LOWER), "  ")
    left_out = not_asked(out_of_reach(claim(**LOWER), "No LLC."), "Too few epochs.")
    assert (left_out.verdict, left_out.explanation) == ("not asked here", "Too few epochs. No LLC.")
    for interval in (between(-0.5, 0.95), between(0.95, 0.99)):
        judged = judge(claim(**LOWER), 0.95, interval, if_not_reproduced="why")
        assert not_asked(judged, "Too few epochs.") is judged


@pytest.mark.parametrize("interval", [None, between(0.95, 0.99)])
def test_missing_value_is_out_of_reach_with_its_reason(interval: Interval | None) -> None:
    result = judge(claim(**LOWER), None, interval, if_not_reproduced="No point of this preset converges.")
    assert result.verdict == "out of reach"
    assert result.explanation == "Not measured. No point of this preset converges."
    refuses("'out of reach' and needs an explanation", ClaimResult, claim(**LOWER), None, interval, "out of reach")


def test_one_exact_value_refutes_an_exact_statement() -> None:
    statement = claim(at_most=1.0, exact=True)
    refuted = judge(statement, 1.2, exact(1.2), if_not_reproduced="Counter-example: H = diag(1, -1).")
    assert refuted.verdict == "refuted"
    assert refuted.explanation == (
        "Measured 1.2 (1.2 to 1.2); needed: at most 1, without exception. Counter-example: H = diag(1, -1)."
    )
    assert judge(statement, 1.0, exact(1.0), if_not_reproduced="-").verdict == "reproduced"
    # a measurement with an error bar does not refute, and neither does one case a claim about what is typical
    assert judge(statement, 1.2, between(1.1, 1.3), if_not_reproduced="-").verdict == "not reproduced"
    assert judge(claim(at_most=1.0), 1.2, exact(1.2), if_not_reproduced="-").verdict == "not reproduced"


def test_explanation_states_what_was_measured_and_why() -> None:
    failed = judge(claim(at_least=0.9), 0.5, between(0.25, 0.75), if_not_reproduced="Batch noise: see laptop+B.")
    assert failed.explanation == "Measured 0.5 (0.25 to 0.75); needed: at least 0.9. Batch noise: see laptop+B."
    assert judge(claim(at_least=0.9), 1, between(1, 1), if_not_reproduced="why").explanation == ""
    text = describe(0.5, between(0.2, 1.2), Criterion(at_least=0.9))
    assert text == "Measured 0.5 (0.2 to 1.2); needed: at least 0.9. The interval lies on both sides of a bound."
    for low, is_open in ((-0.5, True), (-1.5, False)):
        text = describe(low, between(low, low + 1), Criterion(**LOWER))
        assert text.endswith("The direction is open.") == is_open

    one = judge(claim(**LOWER), 0.95, Interval(math.nan, math.nan, "3 points", 3), if_not_reproduced="Why.")
    assert one.verdict == "undecided"
    assert one.explanation == (
        "Measured 0.95 (no interval: 3 points); needed: at least 0.9 (direction: at least 0). "
        "Without numbers at both ends nothing is decided. Why."
    )


def test_refuses_what_has_no_explanation_no_interval_or_another_verdict() -> None:
    stated, middle = claim(**LOWER), between(0.4, 0.6)
    # asked for before the verdict is known
    text = "say in if_not_reproduced what explains a failure"
    refuses(text, judge, stated, 1.0, between(1, 1), if_not_reproduced="")
    refuses(r"value without an interval; use t_interval", judge, stated, 1.0, None, if_not_reproduced="why")
    text = "does not follow from its value and interval; let judge"
    refuses(text, ClaimResult, stated, 0.5, middle, "reproduced")
    refuses("'maybe' is not one of", ClaimResult, stated, 0.5, middle, "maybe", "why")
    no_source = {"paper_value": None, "measure": "Pearson", "criterion": stated.criterion}
    refuses("needs a source; a reader must be able to check it", Claim, "c", "LiSSA agrees.", "", **no_source)


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
    refuses(message, Criterion, **bounds)


def test_criterion_reads_as_text() -> None:
    assert str(Criterion(**BOTH)) == "between 0.9 and 1.1 (direction: at least 0.5)"
    assert str(Criterion(at_most=0.1)) == "at most 0.1"


# ------------------------------------------------------------------------------------ claims.json
def some_results() -> list:
    def claim(name: str, paper_value: float | str | None = None, **bounds: float | bool) -> Claim:
        criterion = Criterion(**(bounds or {"at_least": 0.1, "direction_at_least": 0}))
        return Claim(name, "λ & <η>", "Fig. 1", paper_value, "Pearson", criterion)

    results = [
        (claim("a", 2.5e-4), 1 / 3, Interval(0.1, 0.7, "t 95 %, 3 seeds", 3)),
        (claim("b", "a line"), 0.1, Interval(0.0, math.inf, "t", 3)),
        (claim("c"), 0.1, Interval(-math.inf, 0.2, "t", 3)),
        (claim("d"), None, None),
        (claim("g"), 0.1, t_interval([0.5, -0.5, 0.3])),
        (claim("f", 1, at_most=1.0, exact=True), 1.5, exact(1.5)),
    ]
    judged = [judge(*result, if_not_reproduced="H = diag(1, -1)") for result in results]
    return [*judged, out_of_reach(claim("e"), "needs ImageNet")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "lissa" / "fig1" / "laptop"


def test_what_is_saved_is_loaded(folder: Path) -> None:
    save_claims(folder, some_results())
    assert load_claims(folder) == some_results()
    assert [path.name for path in folder.iterdir()] == ["claims.json"]  # no temporary left behind
    refuses("unique within a target, repeated: a", save_claims, folder, some_results()[:1] * 2)


def test_nan_survives_as_valid_json(folder: Path) -> None:
    claim = some_results()[0].claim
    interval = Interval(math.nan, math.nan, "t 95 %, 1 seed", 1)
    save_claims(folder, [judge(claim, math.nan, interval, if_not_reproduced="one seed")])
    text = (folder / "claims.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    loaded = load_claims(folder)[0]
    assert math.isnan(loaded.value)
    assert math.isnan(loaded.interval.low)


def test_failed_write_leaves_the_old_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_claims(folder, some_results())
    before = (folder / "claims.json").read_bytes()

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_claims(folder, some_results()[:1])
    assert (folder / "claims.json").read_bytes() == before
    assert len(list(folder.iterdir())) == 1


def hand_edited(content: dict) -> dict:
    content["claims"][1]["verdict"] = "reproduced"
    return content


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "null",
        lambda text: text.replace('"schema_version": 3', '"schema_version": 99'),
        lambda text: text.replace('"criterion"', '"criterium"'),
        lambda text: text.replace('"low"', '"lo"'),
        lambda text: json.dumps(hand_edited(json.loads(text))),
    ],
)
def test_damaged_file_is_named_with_the_command(folder: Path, damage: object) -> None:
    save_claims(folder, some_results())
    path = folder / "claims.json"
    path.write_text(damage(path.read_text()))
    text = r"lissa/fig1/laptop/claims\.json is damaged .*run `make lissa-fig1 PRESET=laptop` again"
    refuses(text, load_claims, folder)


def test_binary_and_missing_files_are_named_with_the_command(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses(r"claims\.json is missing: run `make lissa-fig1 PRESET=laptop` again", load_claims, folder)
    folder.mkdir(parents=True)
    (folder / "claims.json").write_bytes(b"\xff\xfe\x00")
    refuses(r"is damaged \(UnicodeDecodeError", load_claims, folder)
    monkeypatch.chdir(tmp_path)  # of a relative folder
    assert rerun_command("ngd/fig2/embedded") == "make ngd-fig2 PRESET=embedded"


# ------------------------------------------------------------------------------------------------------- intervals
def test_t_interval_matches_the_table() -> None:
    # t quantile 0.975 with 2 degrees of freedom is 4.302653 (any printed table); s = 1, n = 3
    interval = t_interval([1.0, 2.0, 3.0])
    assert interval.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-6)
    assert interval.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-6)
    assert (interval.kind, interval.num_samples) == ("t 95 %, 3 seeds", 3)
    one = t_interval([1.0])
    assert [math.isnan(end) for end in (one.low, one.high)] == [True, True]
    assert one.kind == "t 95 %, 1 seed"


@pytest.mark.parametrize("kind", ["t 95 %, 2 seeds", "bootstrap 95 %, 2 points", "lower bounds in 1 of 2 seeds"])
def test_two_values_are_too_few(kind: str) -> None:
    assert Interval(0.0, 1.0, kind, 2).has_too_few_samples
    assert not Interval(0.0, 1.0, kind, 3).has_too_few_samples
    assert not Interval(0.0, 1.0, f"largest of {kind}", 2).has_too_few_samples


ONE_RUN = ["one run", "95 % over realizations", "one estimate", "largest of 3 draws of one sketch"]
ONE_RUN += ["smallest of 2 points of one sequence of batches", "deterministic, 1 seed", "exactly once"]
FIXED = ["deterministic, largest of 9", "exact, OPT, printed", "counted", "smallest of 5 printed rows", "count"]


@pytest.mark.parametrize("kind", ONE_RUN + FIXED)
def test_one_value_decides_where_no_other_seed_would_change_it(kind: str) -> None:
    assert exact(1.0, kind=kind).has_too_few_samples == (kind in ONE_RUN)


def test_the_forecast_is_of_as_many_values_as_the_first_two() -> None:
    # s of 1 and 2 is 1 / √2; t quantile 0.975 with 3 degrees of freedom is 3.182446 (any printed table); n = 4
    low, high = t_interval([1.0, 2.0, 70.0, -3.0]).forecast
    assert (low + high) / 2 == pytest.approx(1.5)
    assert high - low == pytest.approx(2 * 3.182446 / math.sqrt(2) / 2, abs=1e-6)
    assert t_interval([1.0, 2.0]).forecast is None


def test_a_rising_function_maps_all_ends() -> None:
    mapped = t_interval([0.0, 1.0, 2.0]).mapped(math.exp, ", of logarithms")
    plain = t_interval([0.0, 1.0, 2.0])
    ends = (mapped.low, mapped.high, *mapped.forecast)
    assert ends == pytest.approx([math.exp(end) for end in (plain.low, plain.high, *plain.forecast)])
    assert mapped.kind == "t 95 %, 3 seeds, of logarithms"
    assert t_interval([0.0, 1e3, 2e3]).mapped(math.exp).high == math.inf


def test_bootstrap_covers_the_truth() -> None:
    # 200 intervals for the median of 40 normals: nominal 95 %; 4.5 standard deviations below is 88 %.
    generator = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        found = bootstrap_interval(generator.normal(size=40), np.median, num_resamples=300, generator=generator)
        hits += found.low <= 0 <= found.high
    assert 0.88 <= hits / 200 < 1


def test_bootstrap_resamples_pairs_together() -> None:
    x = np.random.default_rng(0).normal(size=50)
    interval = bootstrap_interval(
        (x, 2 * x), lambda a, b: np.corrcoef(a, b)[0, 1], num_resamples=50, generator=np.random.default_rng(0)
    )
    assert interval.low == pytest.approx(1.0)
    assert interval.high == pytest.approx(1.0)


def test_bootstrap_depends_on_its_generator_only() -> None:
    values = np.random.default_rng(0).exponential(size=30)

    def found(statistic: Callable[..., Any], seed: int) -> Interval:
        return bootstrap_interval(values, statistic, num_resamples=100, generator=np.random.default_rng(seed))

    assert found(np.mean, 7) == found(np.mean, 7)
    assert found(np.mean, 7) != found(np.mean, 8)
    assert found(np.mean, 7).kind == "bootstrap 95 %, 30 points"
    # A statistic along an axis gives the interval of one that is called for each resample.
    assert found(np.median, 7) == found(lambda sample: float(np.median(sample)), 7)


def test_equal_points_give_a_point_and_nan_among_the_values_nan_ends() -> None:
    equal = bootstrap_interval(np.ones(10), np.mean, num_resamples=50, generator=np.random.default_rng(0))
    assert (equal.low, equal.high) == (1.0, 1.0)
    values = [1.0, 2.0, math.nan]
    found = bootstrap_interval(values, np.mean, num_resamples=50, generator=np.random.default_rng(0))
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert math.isnan(t_interval(values).low)


def test_refuses_bad_input() -> None:
    refuses("needs low <= high, got 2 and 1; swap them", Interval, 2.0, 1.0, "t", 3)
    refuses("needs a kind that says how it was found", Interval, 1.0, 2.0, " ", 3)
    generator = np.random.default_rng(0)
    refuses(
        r"need one length, got \[3, 2\]", bootstrap_interval, ([1, 2, 3], [1, 2]), np.mean, generator=generator
    )
    refuses(r"vector of independent values, got shape \(2, 2\)", t_interval, [[1, 2], [3, 4]])
    refuses(r"write 0\.95 for 95 %", t_interval, [1, 2], confidence=95)
