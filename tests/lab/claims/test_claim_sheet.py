"""Claims of a YAML file: what is read and refused, and values against plain loops over made-up rows."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from curvlab.lab import exact, judge, out_of_reach, t_interval
from curvlab.lab.claims import load_claim_sheet
from curvlab.lab.claims.claim_sheet import load_claims, save_claims
from curvlab.lab.claims.claim_values import Measured, check, measure
from curvlab.lab.claims.claims import NOT_ASKED, UNJUDGED
from curvlab.lab.targets.execution import judged
from curvlab.lab.targets.target import ROOT
from tests.refusals import refuses


def made_up(seed: int) -> pd.DataFrame:
    """Rows of 2 tasks, 4 seeds, 2 methods and 3 points, in random order."""
    rng = np.random.default_rng(seed)
    rows = [
        {"task": task, "seed": run, "method": method, "point": point}
        for task in ("a", "b")
        for run in range(4)
        for method in ("ours", "random")
        for point in range(3)
    ]
    table = pd.DataFrame(rows).sample(frac=1, random_state=seed, ignore_index=True)
    table["x"] = rng.lognormal(size=len(table))
    table["found at 20 %"] = table.x * rng.lognormal(size=len(table))
    return table


def found(table: pd.DataFrame, **value: Any) -> dict[str, Measured]:
    check(value)
    return {measured.of: measured for measured in measure(value, {"table": table})}


def rows_of(table: pd.DataFrame, **cells: object) -> list[Mapping[str, Any]]:
    return [row for row in table.to_dict("records") if all(row[name] == cell for name, cell in cells.items())]


SEEDS = range(12)
Y = "found at 20 %"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mean_is_over_repetitions_each_of_which_is_the_mean_of_its_rows(seed: int) -> None:
    table = made_up(seed)
    means = found(table, mean=f"x - `{Y}`", where="method == 'ours' and point < 2", over="seed", by="task")
    assert list(means) == list(dict.fromkeys(table[(table.method == "ours") & (table.point < 2)].task))
    for task, measured in means.items():
        own = [row for row in rows_of(table, task=task, method="ours") if row["point"] < 2]
        by_seed = [np.mean([row["x"] - row[Y] for row in own if row["seed"] == run]) for run in range(4)]
        expected = t_interval(sorted(by_seed))
        assert measured.value == pytest.approx(np.mean(by_seed))
        assert (measured.interval.low, measured.interval.high) == pytest.approx((expected.low, expected.high))
        assert measured.interval.kind == "t 95 %, 4 seeds"
        assert sorted(measured.fact[:-1].partition(": ")[2].split(", ")) == sorted(f"{v:.3g}" for v in by_seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_extreme_is_exact_or_has_the_interval_of_its_row(seed: int) -> None:
    table = made_up(seed)
    table["low"], table["high"] = table.x - 0.5, table.x + 0.25
    best = max(table.to_dict("records"), key=lambda row: row["x"])
    measured = found(table, largest="x", unit="settings")[""]
    assert (measured.value, measured.interval.low, measured.interval.high) == (best["x"],) * 3
    assert measured.interval.kind == "largest of 48 settings"
    names = ("task", "seed", "method", "point")
    assert measured.fact.startswith(f"The largest is at {', '.join(f'{name} {best[name]}' for name in names)}: ")
    least = found(table, smallest="x", low="low", high="high", by=["task", "method"])
    for of, one in least.items():
        task, method = of.split(", ")
        value = min(row["x"] for row in rows_of(table, task=task, method=method))
        assert (one.value, one.interval.low, one.interval.high) == (value, value - 0.5, value + 0.25)
    alone = found(table[:1], largest="x")[""]
    assert (alone.fact, alone.interval.kind, alone.interval.has_too_few_samples) == ("", "one run", True)
    assert found(table.assign(x=1.0), largest="x")[""].fact == ""
    table["drawn"] = np.arange(3, 51)
    drawn = found(table, largest="x", low="low", high="high", samples="drawn", unit="networks")[""].interval
    of = 3 + table.x.argmax()
    assert (drawn.low, drawn.kind, drawn.num_samples) == (best["x"] - 0.5, f"bootstrap 95 %, {of} networks", of)


def test_nan_is_not_passed_over() -> None:
    table = made_up(0)
    table.loc[5, "x"] = np.nan
    for over in ({"mean": "x", "over": "seed"}, {"largest": "x"}, {"smallest": "x"}):
        assert math.isnan(found(table, **over)[""].value)
    assert not math.isnan(found(table, mean="x", over="seed", where="x.notna()")[""].value)


def test_where_no_row_counts_there_is_no_value() -> None:
    table = made_up(0)
    assert found(table, largest="x", where="x < 0")[""].value is None
    where = "task == 'a'"
    assert list(found(table, largest="x", by="task", where=where)) == ["a"]
    both = found(table, largest="x", by="task", where=where, otherwise="Not computed.")
    assert (both["b"].value, both["b"].fact) == (None, "Not computed.")
    assert both["a"].value is not None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "must be a mapping"),
        ({"mean": "x", "over": "seed", "filter": "y"}, "unknown keys: filter; known are mean, "),
        ({"over": "seed"}, "needs one of mean, .*got none"),
        ({"largest": "x", "smallest": "x"}, "got largest, smallest"),
        ({"mean": "x"}, "needs `over`"),
        ({"largest": "x", "low": "y"}, "both or none"),
        ({"mean": "x", "over": "seed", "low": "x", "high": "x"}, "of a largest or smallest"),
        ({"largest": "x", "samples": "n"}, "name its `low`, `high`"),
    ],
)
def test_what_is_wrong_is_said_before_any_table_is_read(value: Any, text: str) -> None:
    refuses(text, check, value)


@pytest.mark.parametrize("expression", ["z", "x +", "x.no_such()"])
def test_an_expression_that_does_not_fit_names_the_columns(expression: str) -> None:
    with pytest.raises(ValueError, match=r"does not fit table\.csv .*columns are: task, seed, method, point, x"):
        found(made_up(0), largest=expression)


class NoTarget:
    """Its `judge` knows the claim `rest` alone."""

    def __init__(self, claims_file: Path) -> None:
        self.claims_file = claims_file

    def load(self, room: str) -> Any:
        assert room == "judge"
        return lambda tables, claims: [judge(claims.claim("rest"), 1.0, exact(1.0), if_not_reproduced="-")]


def test_verdicts_of_a_sheet_come_in_its_order_and_with_the_numbers_behind_them(tmp_path: Path) -> None:
    claim = {"statement": "So.", "paper_value": None, "measure": "m", "criterion": {"at_most": 0.0}}
    by_task = {"statement": "So ({of}).", "value": {"mean": "x", "over": "seed", "by": "task"}}
    claims = {
        "first": claim | by_task | {"why": "It is positive."},
        "rest": claim,
        "last": claim | {"value": {"smallest": "x", "where": "x < 0", "otherwise": "No rows."}},
    }
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump({"source": "s", "claims": claims}, sort_keys=False))

    class Tables(dict):
        config: dict[str, int] = {}  # noqa: RUF012

    table = made_up(0).sort_values("task")
    results = judged(NoTarget(tmp_path / "claims.yaml"), Tables(table=table))
    assert [result.claim.id for result in results] == ["first-a", "first-b", "rest", "last"]
    assert [result.verdict for result in results] == [*["not reproduced"] * 3, "out of reach"]
    assert re.fullmatch("Measured .* By seed: .* It is positive.", results[0].explanation)
    assert results[-1].explanation == "No rows."
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump({"source": "s", "claims": {"a": claim | {"value": 3}}}))
    refuses("claim 'a': `value` must be a mapping", load_claim_sheet, tmp_path / "claims.yaml")


# ------------------------------------------------------------------------------------ the sheet
SHEET = """\
source: A paper, Fig. 6
claims:
  falls:
    statement: "It falls ({of}) by {share}."
    paper_value: 0.5
    measure: the end over the start
    criterion: {at_most: "{bound}", direction_at_most: 1.0}
    changed:
      - 2026-11-20: over the mean
  falls-not:
    statement: It does not fall.
    source: A paper, text
    paper_value: null
    measure: the same
    criterion: {at_least: 1}
"""


@pytest.fixture
def sheet(tmp_path: Path) -> Path:
    (tmp_path / "claims.yaml").write_text(SHEET)
    return tmp_path / "claims.yaml"


def test_claims_are_read_with_their_words_filled_in(sheet: Path) -> None:
    claim = load_claim_sheet(sheet).claim("falls", of="mlp", share="half", bound=0.5)
    assert (claim.id, claim.statement, claim.source) == ("falls-mlp", "It falls (mlp) by half.", "A paper, Fig. 6")
    assert (claim.criterion.at_most, claim.criterion.direction_at_most) == (0.5, 1.0)
    assert [(change.date, change.what) for change in claim.changed] == [("2026-11-20", "over the mean")]
    other = load_claim_sheet(sheet).claim("falls-not")
    assert (other.id, other.source, other.paper_value, other.changed) == ("falls-not", "A paper, text", None, ())


def test_a_claim_may_take_what_another_states(sheet: Path) -> None:
    own = SHEET.replace("  falls:", "  falls: &falls").replace("    measure: the same\n", "    <<: *falls\n")
    sheet.write_text(own)
    claim = load_claim_sheet(sheet).claim("falls-not")
    assert (claim.statement, claim.measure) == ("It does not fall.", "the end over the start")


@pytest.mark.parametrize("source", ["ours; not in the paper", "curvlab, stated before the first run"])
def test_a_claim_of_ours_needs_no_value_of_a_paper(sheet: Path, source: str) -> None:
    sheet.write_text(SHEET.replace("A paper, text\n    paper_value: null", source))
    assert load_claim_sheet(sheet).claim("falls-not").paper_value is None


def test_every_claim_must_be_judged(sheet: Path) -> None:
    claims = load_claim_sheet(sheet)
    results = [judge(claims.claim("falls-not"), 1.0, exact(1.0), if_not_reproduced="x")]
    refuses("states falls, and no run judged it", claims.check_all_judged, results)
    falls = claims.claim("falls", of="mlp", share="half", bound=0.5)
    claims.check_all_judged([*results, judge(falls, 0.1, exact(0.1), if_not_reproduced="x")])


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("source: A paper, Fig. 6", "sauce: x", "needs `source` and `claims`"),
        ("    measure: the same\n", "", "claim 'falls-not' lacks measure"),
        ("    paper_value: null\n", "", "claim 'falls-not' lacks paper_value"),
        ("    measure: the same", "    measure: the same\n    metric: x", "unknown keys: metric; known are"),
        ("  falls-not:", "  falls:", "falls stands twice"),
        ("{at_least: 1}", "{at_leats: 1}", "claim 'falls-not': .*at_leats"),
        ("{at_least: 1}", "{at_least: 1, at_most: 0}", "claim 'falls-not': .*swap them"),
        ("claims:", "claims: [", "needs `source` and `claims`"),
        (
            "2026-11-20: over",
            "date: 2026-11-20\n        what: over",
            "claim 'falls': a change is its day and what",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_named(sheet: Path, old: str, new: str, text: str) -> None:
    sheet.write_text(SHEET.replace(old, new))
    refuses(text, lambda: load_claim_sheet(sheet).claim("falls-not"))


def test_unknown_claims_and_empty_words_are_named(sheet: Path) -> None:
    claims = load_claim_sheet(sheet)
    refuses("no claim 'fall'; it has: falls, falls-not", claims.claim, "fall", error=KeyError)
    refuses(r"claim 'falls': nothing fills \{share\}", claims.claim, "falls", of="mlp", bound=1)


def test_what_a_claim_is_of_is_never_empty(sheet: Path) -> None:
    sheet.write_text(SHEET.replace("by {share}", "by half").replace('"{bound}"', "0.5"))
    claims = load_claim_sheet(sheet)
    refuses(r"claim 'falls': nothing fills \{of\}", claims.claim, "falls")
    falls, falls_not = (claims.unjudged(name, "Not run.") for name in ("falls", "falls-not"))
    assert (falls.claim.id, falls.claim.statement) == ("falls-all", "It falls (all) by half.")
    assert falls_not.claim.id == "falls-not"
    assert claims.unjudged("falls", "Not run.", of="mlp").claim.id == "falls-mlp"
    sheet.write_text(SHEET.replace('"{bound}"', "0.5"))
    of_all, of_half = (
        load_claim_sheet(sheet).unjudged("falls", "Not run.", **words) for words in ({}, {"share": "half"})
    )
    assert of_all.claim.statement == "It falls (all) by all."
    assert of_half.claim.statement == "It falls (all) by half."


def test_values_of_no_row_are_of_all(sheet: Path) -> None:
    value = {"mean": "x", "over": "seed", "by": "task", "where": "x < 0"}
    claim = {"statement": "So ({of}).", "paper_value": None, "measure": "m", "criterion": {"at_most": 0.0}}
    sheet.write_text(yaml.safe_dump({"source": "s", "claims": {"so": claim | {"value": value}}}))
    (result,) = load_claim_sheet(sheet).judge_values({"table": made_up(0)})
    assert (result.claim.id, result.claim.statement, result.verdict) == ("so-all", "So (all).", "out of reach")


@pytest.mark.parametrize("pattern", ["falls-*", "*"])
def test_a_preset_says_beforehand_what_it_cannot_decide(sheet: Path, pattern: str) -> None:
    content = yaml.safe_load(sheet.read_text())
    sheet.write_text(yaml.safe_dump(content | {"not_asked": {"laptop": {pattern: "One seed."}}}))
    claims = load_claim_sheet(sheet)
    stated = claims.claim("falls", of="mlp", share="half", bound=0.5)
    wide = judge(stated, None, None, if_not_reproduced="-") if pattern == "*" else out_of_reach(stated, "No LLC.")
    assert [result.verdict for result in claims.asked([wide], "laptop")] == ["not asked here"]
    assert claims.asked([wide], "embedded") == [wide]
    other = replace(wide, claim=replace(wide.claim, id="other"))
    assert (claims.asked([other], "laptop")[0].verdict == "out of reach") == (pattern != "*")
    if pattern == "*":  # for a preset that decides nothing
        decided = [judge(stated, 0.2, exact(0.2), if_not_reproduced="why")]
        refuses(r'asks nothing of laptop \("\*"\), which decides falls-mlp: name', claims.asked, decided, "laptop")


@pytest.mark.parametrize("value", [0.2, -3.0])
def test_what_is_shown_is_never_judged_and_keeps_its_value(sheet: Path, value: float) -> None:
    content = yaml.safe_load(sheet.read_text())
    content["claims"]["falls"]["shown"] = "Seconds of one machine."
    sheet.write_text(yaml.safe_dump(content))
    claims = load_claim_sheet(sheet)
    stated = claims.claim("falls", of="mlp", share="half", bound=0.5)
    (result,) = claims.asked([judge(stated, value, exact(value), if_not_reproduced="why")], "laptop")
    assert (result.verdict, result.value, result.weighed) == ("not asked here", value, "not asked here")
    assert result.explanation.startswith("Seconds of one machine. ")
    others = [judge(claims.claim("falls-not"), 0.2, exact(0.2), if_not_reproduced="why")]
    others.append(out_of_reach(stated, "It did not run."))
    assert claims.asked(others, "laptop") == others


PAPERS = {
    "lissa": "Klochkov & Liu", "pbrf": "Bae et al.", "ngd": "Saghir et al.", "rank1": "Semenov", "ginger": "Ginger"
}  # fmt: skip


@pytest.mark.parametrize("preset", ["embedded", "laptop"])
def test_what_is_asked_of_a_preset_is_decided_but_for_few_claims(preset: str) -> None:
    folders = [path.parent for path in (ROOT / "results").glob(f"*/*/{preset}/claims.json")]
    claims = [result for folder in folders for result in load_claims(folder)]
    asked = [result for result in claims if result.verdict != NOT_ASKED]
    own = {paper: [each for each in asked if each.claim.source.startswith(of)] for paper, of in PAPERS.items()}
    together = [result for of_paper in own.values() for result in of_paper]
    for of_papers, share in ((together, 10), *((of_paper, 7) for of_paper in own.values())):
        assert len(of_papers) >= 15
        for verdict in ("undecided", "out of reach"):
            found = [result.claim.id for result in of_papers if result.verdict == verdict]
            assert len(found) <= len(of_papers) / share, found


# What fewer than three values may decide, whatever the code now says: what no other seed would change.
FIXED = {"deterministic", "exact", "printed", "count", "counted", "allocations", "largest", "smallest", "least"}


def test_no_published_verdict_stems_from_one_run() -> None:
    few = []
    for path in sorted((ROOT / "results").glob("*/*/*/claims.json")):
        for entry in json.loads(path.read_text())["claims"]:
            if entry["interval"] and entry["verdict"] not in UNJUDGED and entry["interval"]["num_samples"] < 3:
                few.append((path.parent, entry["claim"]["id"], entry["interval"]["kind"]))
    assert len(few) > 200
    assert not [each for each in few if re.split(r"[ ,:]", each[2])[0] not in FIXED]
    assert not [each for each in few if re.search(r"\b(one|1) (run|seed|order|sequence|draw|sketch)", each[2])]


def test_what_a_published_preset_does_not_ask_is_there() -> None:
    for path in sorted((ROOT / "experiments").glob("*/**/*.yaml")):
        if path.parent.name == "papers":
            continue
        item = path.parent if path.name == "claims.yaml" else path.with_suffix("")
        for preset, reasons in load_claim_sheet(path).left_out.items():
            folder = ROOT / "results" / item.relative_to(ROOT / "experiments") / preset
            there = [result.claim.id for result in load_claims(folder) if result.verdict == NOT_ASKED]
            for pattern in reasons:
                assert any(fnmatchcase(name, pattern) for name in there), (path.name, preset, pattern)


def test_saved_claims_repeat_nothing_that_their_sheet_states(tmp_path: Path) -> None:
    path = ROOT / "experiments" / "lissa" / "fig1.yaml"
    claims = load_claim_sheet(path)
    as_stated = claims.claim("cell", of="early", constant="2", regime="is stopped early")
    altered = replace(claims.claim("overflow"), statement="Something else.")
    results = [judge(claim, 0.5, exact(0.5), if_not_reproduced="why") for claim in (as_stated, altered)]
    text = save_claims(tmp_path / "lissa" / "fig1" / "laptop", results, path).read_text()
    assert load_claims(tmp_path / "lissa" / "fig1" / "laptop") == results
    assert as_stated.statement not in text
    assert "Something else." in text
