from __future__ import annotations

from pathlib import Path

import pytest

from curvlab.lab.reporting import exact, judge, load_claim_sheet

SHEET = """\
source: A paper, Fig. 6
claims:
  falls:
    statement: "It falls ({of}) by {share}."
    paper_value: 0.5
    measure: the end over the start
    criterion: {at_most: "{bound}", direction_at_most: 1.0}
    changed:
      - {date: 2026-11-20, what: over the mean}
  falls-not:
    statement: It does not fall.
    source: A paper, text
    paper_value: null
    measure: the same
    criterion: {at_least: 1}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "claims.yaml").write_text(SHEET)
    return tmp_path / "claims.yaml"


def test_claims_are_read_with_their_words_filled_in(path: Path) -> None:
    claim = load_claim_sheet(path).claim("falls", of="mlp", share="half", bound=0.5)
    assert (claim.id, claim.statement, claim.source) == ("falls-mlp", "It falls (mlp) by half.", "A paper, Fig. 6")
    assert (claim.criterion.at_most, claim.criterion.direction_at_most) == (0.5, 1.0)
    assert [(change.date, change.what) for change in claim.changed] == [("2026-11-20", "over the mean")]
    other = load_claim_sheet(path).claim("falls-not")
    assert (other.id, other.source, other.paper_value, other.changed) == ("falls-not", "A paper, text", None, ())


def test_every_claim_must_be_judged(path: Path) -> None:
    sheet = load_claim_sheet(path)
    results = [judge(sheet.claim("falls-not"), 1.0, exact(1.0), if_not_reproduced="x")]
    with pytest.raises(ValueError, match="states falls, and no run judged it"):
        sheet.check_all_judged(results)
    falls = sheet.claim("falls", of="mlp", share="half", bound=0.5)
    sheet.check_all_judged([*results, judge(falls, 0.1, exact(0.1), if_not_reproduced="x")])


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("source: A paper, Fig. 6", "sauce: x", "needs `source` and `claims`"),
        ("    measure: the same\n", "", "claim 'falls-not' lacks measure"),
        ("    measure: the same", "    measure: the same\n    metric: x", "unknown keys: metric; known are"),
        ("  falls-not:", "  falls:", "falls stands twice"),
        ("{at_least: 1}", "{at_leats: 1}", "claim 'falls-not': .*at_leats"),
        ("{at_least: 1}", "{at_least: 1, at_most: 0}", "claim 'falls-not': .*swap them"),
        ("claims:", "claims: [", "needs `source` and `claims`"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(path: Path, old: str, new: str, text: str) -> None:
    path.write_text(SHEET.replace(old, new))
    with pytest.raises(ValueError, match=text):
        load_claim_sheet(path).claim("falls-not")


def test_unknown_claims_and_empty_words_are_named(path: Path) -> None:
    sheet = load_claim_sheet(path)
    with pytest.raises(KeyError, match="no claim 'fall'; it has: falls, falls-not"):
        sheet.claim("fall")
    with pytest.raises(ValueError, match=r"claim 'falls': nothing fills \{share\}"):
        sheet.claim("falls", of="mlp", bound=1)
