"""One verdict and one sentence for each headline: the rule, the numbers of sentences, and the committed ones."""

import re
from pathlib import Path

import pytest
import yaml

from curvlab.lab import Claim, Criterion, Interval, judge, plots
from curvlab.lab.reporting.findings import HEADLINES, NO_VALUE, find, headline_verdict, tell, written
from curvlab.lab.reporting.forest import forest
from curvlab.lab.reporting.readme import filled_readme
from curvlab.lab.reporting.results import read_results

ROOT = Path(__file__).parents[3]
CLAIM = Claim("c", "It holds.", "Sec. 1", "0.93 (Pearson)", "correlation", Criterion(at_least=0.9))
HELD = {"a/b/c": judge(CLAIM, 0.951, Interval(0.93, 0.97, "t 95 %, 3 seeds", 3), if_not_reproduced="-")}


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [
        ("o", "out of reach"), ("", "out of reach"), ("roo", "reproduced"), ("rrud", "direction only"),
        ("rrr ud", "reproduced"), ("ru", "direction only"), ("du", "direction only"), ("duu", "undecided"),
        ("rn", "in part"), ("df", "in part"), ("nu", "not reproduced"), ("nuu", "undecided"),
        ("fo", "not reproduced"),
    ],
)  # fmt: skip
def test_the_rule_of_a_headlines_verdict(verdicts: str, verdict: str) -> None:
    words = {"r": "reproduced", "d": "direction only", "u": "undecided", "n": "not reproduced", "f": "refuted"}
    assert headline_verdict((words | {"o": "out of reach"})[each] for each in verdicts.replace(" ", "")) == verdict


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("", "0.95"), (":%", "95 %"), (":-%", "−95 %"), (":/", "1.1"), (":10^", "8.9"),
        (":-", "−0.95"), (":1/(1-)", "20"), (":-points", "−95 (−97 to −93)"),
        (":interval", "0.95 (0.93 to 0.97)"),
        (":points", "95 (93 to 97)"), (":paper", "0.93 (Pearson)"),
    ],
)  # fmt: skip
def test_a_sentence_has_its_claims_numbers(form: str, text: str) -> None:
    assert tell("a", f"It is {{b/c{form}}}, {{a/b/c{form}}} and {{b/none{form}}}.", HELD) == (
        f"It is {text}, {text} and {NO_VALUE}."
    )


def test_an_unknown_form_is_named() -> None:
    with pytest.raises(ValueError, match=r"\{b/c:pct\}: after a colon stands one of .*interval"):
        tell("a", "{b/c:pct}", HELD)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.0123, "0.012"),
        (-0.32, "−0.32"),
        (7.71, "7.7"),
        (0.99964, "0.9996"),
        (1.0, "1"),
        (52.77, "53"),
        (1057.2, "1,057"),
        (4e-16, "4e-16"),
    ],
)
def test_numbers_have_two_digits(value: float, text: str) -> None:
    assert written(value) == text


@pytest.fixture(scope="module")
def committed():
    return find(read_results(ROOT / "results"))


def test_every_sentence_has_its_value_and_every_pattern_its_claims(committed) -> None:
    content = yaml.safe_load(HEADLINES.read_text(encoding="utf-8"))
    assert sum(len(entry["headlines"]) for entry in content.values()) <= 40
    for paper in committed:
        for text in (paper.text, *(finding.text for finding in paper.findings)):
            assert NO_VALUE not in text
        for finding in paper.findings:
            assert finding.preset
            assert finding.shown is not None, finding.headline.says
            for pattern in finding.headline.claims:
                bare = re.escape(pattern).replace(r"\*", ".*").replace(r"\[", "[").replace(r"\]", "]")
                assert any(re.fullmatch(bare, name) for name in finding.results), pattern


def test_no_number_of_ours_is_typed() -> None:
    names = r"C = 2|at most 1|Eq\. (3|10)|T5|LeNet-5|Theorem 1|takes 2"
    for paper, entry in yaml.safe_load(HEADLINES.read_text(encoding="utf-8")).items():
        for sentence in (entry["found"], *(headline["finding"] for headline in entry["headlines"])):
            typed = re.sub(rf"\{{[^}}]*\}}|{names}", "", sentence)
            assert not re.search(r"\d", typed), f"{paper}: {sentence}"


def test_a_number_that_the_paper_does_not_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "headlines.yaml"
    headline = {"says": "a", "claims": ["tab5/no-gaps-*"], "short": "a", "finding": "b", "number": 0.123}
    headline["shown"] = "tab5/no-gaps-logistic-pima-diabetes"
    path.write_text(yaml.safe_dump({"pbrf": {"says": "", "found": "", "picture": "", "headlines": [headline]}}))
    with pytest.raises(ValueError, match=r"number: 0\.123 stands in no paper_value of its claims"):
        find(read_results(ROOT / "results"), path)


@pytest.mark.parametrize("content", ["[", "lissa: 3", "lissa: {says: x}", "- a"])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "headlines.yaml").write_text(content)
    with pytest.raises(
        ValueError, match=r"(?s)headlines\.yaml is damaged .*each paper needs says, found, picture"
    ):
        find(read_results(ROOT / "results"), tmp_path / "headlines.yaml")


def test_the_picture_and_the_readme_are_those_of_the_results(committed, tmp_path: Path) -> None:
    plots.write_png(forest(committed, {}), tmp_path / "findings.png")  # fonts may differ: not compared by bytes
    assert (ROOT / "results" / "findings.png").is_file()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert filled_readme(readme, ROOT / "results", committed) == readme, "run `make report`: README.md is stale"
    with pytest.raises(ValueError, match="lacks the line"):
        filled_readme("", ROOT / "results", committed)
