from pathlib import Path

import pytest

from curvlab.lab.reporting.headlines import Headline, findings, load_headlines
from curvlab.lab.reporting.result_folder import read_results

ROOT = Path(__file__).parents[3]


def test_findings_by_preset(results: Path) -> None:
    folders = read_results(results)
    found = findings(Headline("", ("lissa/fig1/exact-*", "lissa/tab3/exact-correlates")), folders)
    assert [(each.preset, dict(each.verdicts)) for each in found] == [
        ("embedded", {"reproduced": 1, "direction only": 1}),
        ("laptop", {"reproduced": 1}),
    ]
    assert [folder.key for folder, _ in found[0].results] == ["lissa/tab3", "lissa/fig1"]
    assert findings(Headline("", ("lissa/fig1/exact",)), folders) == ()  # without a star the whole name counts


def test_every_headline_names_claims_that_are_published_or_written_down() -> None:
    folders = read_results(ROOT / "results")
    published = {folder.paper for folder in folders}
    for paper, headlines in load_headlines(ROOT / "experiments" / "papers").items():
        for headline in headlines:
            for claim in headline.claims:
                found = findings(Headline("", (claim,)), folders) or _written_down(claim)
                assert paper not in published or found, claim


def _written_down(claim: str) -> bool:
    """Whether the target's claims.yaml has it: its results may not have been computed since."""
    folder, _, name = claim.rpartition("/")
    return f"\n  {name.removesuffix('-*')}:\n" in (ROOT / "experiments" / folder / "claims.yaml").read_text()


def test_no_file_no_headlines(tmp_path: Path) -> None:
    assert load_headlines(tmp_path) == {}


@pytest.mark.parametrize(
    "content", ["[", "lissa: 3", "lissa: [{says: x}]", "lissa: [{says: x, claims: 3}]", "- a"]
)
def test_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "headlines.yaml").write_text(content)
    with pytest.raises(ValueError, match=r"headlines\.yaml is damaged .*needs a list of `says` and `claims`"):
        load_headlines(tmp_path)
