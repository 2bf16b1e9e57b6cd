"""Headlines: verdicts and sentences."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.colors import to_hex

from curvlab.lab import Claim, Criterion, Interval, judge, out_of_reach, plots, tables
from curvlab.lab.reporting.findings import HEADLINES, NO_VALUE, find, headline_verdict, tell, written
from curvlab.lab.reporting.forest import _HOLDS as HOLDS
from curvlab.lab.reporting.forest import forest, paper_words
from curvlab.lab.reporting.readme import EDGE, PARTS, WORDS, Board, filled_readme, peers, with_words
from curvlab.lab.reporting.results import read_results
from curvlab.lab.targets.target import ROOT
from tests.refusals import refuses

# --- One verdict and one sentence for each headline: the rule, the numbers of sentences, and the committed ones
CLAIM = Claim("c", "It holds.", "Sec. 1", "0.93 (Pearson)", "correlation", Criterion(at_least=0.9))
HELD = {"a/b/c": judge(CLAIM, 0.951, Interval(0.93, 0.97, "t 95 %, 3 seeds", 3), if_not_reproduced="-")}


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [
        ("o", "out of reach"), ("", "out of reach"), ("roo", "reproduced"), ("rrud", "direction only"),
        ("rrr ud", "reproduced"), ("ru", "undecided"), ("du", "undecided"), ("ddu", "direction only"),
        ("rn", "in part"), ("df", "in part"), ("nu", "not reproduced"), ("nuu", "not reproduced"),
        ("fo", "not reproduced"),
    ],
)  # fmt: skip
def test_the_rule_of_a_headlines_verdict(verdicts: str, verdict: str) -> None:
    words = {"r": "reproduced", "d": "direction only", "u": "undecided", "n": "not reproduced", "f": "refuted"}
    assert headline_verdict((words | {"o": "out of reach"})[each] for each in verdicts.replace(" ", "")) == verdict


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("", "0.95"), (":%", "95 %"), (":100", "95"), (":-%", "−95 %"), (":-log %", "−61 %"), (":/", "1.1"),
        (":10^", "8.9"), (":-", "−0.95"), (":1/(1-)", "20"), (":-points", "−95 (−97 to −93)"),
        (":interval", "0.95 (0.93 to 0.97)"), (":at most", "0.97"), (":100 at most", "97"),
        (":points", "95 (93 to 97)"), (":paper", "0.93 (Pearson)"),
    ],
)  # fmt: skip
def test_a_sentence_has_its_claims_numbers(form: str, text: str) -> None:
    assert tell("a", f"It is {{b/c{form}}}, {{a/b/c{form}}} and {{b/none{form}}}.", HELD) == (
        f"It is {text}, {text} and {NO_VALUE}."
    )


def test_an_interval_that_two_digits_would_move_has_three() -> None:
    near_one = judge(CLAIM, 1.0126, Interval(0.9334, 1.0582, "t 95 %, 3 seeds", 3), if_not_reproduced="-")
    assert tell("a", "{b/c:interval}", {"a/b/c": near_one}) == "1.01 (0.933 to 1.06)"


def test_an_interval_without_width_is_its_value() -> None:
    counted = judge(CLAIM, 1.08, Interval(1.08, 1.08, "one run", 1), if_not_reproduced="-")
    assert tell("a", "{b/c:interval}", {"a/b/c": counted}) == "1.1"


def test_a_name_with_stars_stands_for_many_claims() -> None:
    low = judge(CLAIM, 0.2, Interval(0.1, 0.3, "t 95 %, 3 seeds", 3), if_not_reproduced="-")
    many = {"a/b/c-1": HELD["a/b/c"], "a/b/c-2": low, "a/b/d": low, "a/b/c-3": out_of_reach(CLAIM, "No GPU.")}
    told = tell("a", "{b/c-*:largest}, {b/c-*:count}, {b/c-*:count not reproduced}, {b/x*:largest}", many)
    assert told == f"0.95, 2, 1, {NO_VALUE}"
    refuses("forms largest, count and count VERDICT, not '%'", tell, "a", "{b/c-*:%}", many)


def test_an_unknown_form_is_named() -> None:
    refuses(r"\{b/c:pct\}: after a colon stands one of .*interval", tell, "a", "{b/c:pct}", HELD)


def test_numbers_have_two_digits() -> None:
    values = [0.0, 0.0123, -0.32, 7.71, 0.99964, 1.0, 52.77, 1057.2, 4e-16]
    assert [*map(written, values)] == ["0", "0.012", "−0.32", "7.7", "0.9996", "1", "53", "1,057", "4e-16"]


@pytest.fixture(scope="module")
def committed():
    return find(read_results(ROOT / "results"))


def test_every_sentence_has_its_value_and_every_pattern_its_claims(committed) -> None:
    content = yaml.safe_load(HEADLINES.read_text(encoding="utf-8"))
    assert sum(len(entry["headlines"]) for entry in content.values()) <= 40
    for paper in committed:
        for words in (paper.text, *(finding.text for finding in paper.findings)):
            assert NO_VALUE not in words
        for finding in paper.findings:
            assert finding.preset
            assert finding.shown is not None, finding.headline.says
            for pattern in finding.headline.claims:
                bare = re.escape(pattern).replace(r"\*", ".*").replace(r"\[", "[").replace(r"\]", "]")
                assert any(re.fullmatch(bare, name) for name in finding.results), pattern


# What to do because of it: a clause that begins with one of these, after a full stop or a colon.
ADVICE = "check|compare|compute|do not|draw|expect|keep|look|measure|pay|plan|prefer|read|rely|say|state"
ADVISES = re.compile(rf"(?i)[.:] ({ADVICE}|take|try|use)\b|, take ")


def test_no_number_of_ours_is_typed_and_a_finding_has_one_and_an_advice() -> None:
    names = r"Eq\. 10|log10|T5|LeNet-5|Theorem 1|Lemma 1|takes 2"
    for paper, entry in yaml.safe_load(HEADLINES.read_text(encoding="utf-8")).items():
        for sentence in (entry["found"], *(headline["finding"] for headline in entry["headlines"])):
            assert len(re.findall(r"\{", sentence)) == 1, f"{paper}: {sentence}"
            assert ADVISES.search(sentence), f"{paper}: what to do? {sentence}"
            assert len(sentence.split()) <= 50, f"{paper}: {sentence}"
            typed = re.sub(rf"\{{[^}}]*\}}|{names}", "", sentence)
            assert not re.search(r"\d", typed), f"{paper}: {sentence}"
    words = yaml.safe_load(WORDS.read_text(encoding="utf-8"))
    for sentence in (*words["story"], words["times"], words["which"], words["protocols"], words["more"]):
        typed = re.sub(r"\{[^}]*\}|\(results/.*?\)|T5|GPT-2|ptb-gpt2|BM25|1/length|95 % intervals", "", sentence)
        assert not re.search(r"\d", typed), sentence
    for sentence in words["story"]:
        assert 1 <= len(re.findall(r"\{", sentence)) <= 2, sentence
        assert ADVISES.search(sentence), f"what to do? {sentence}"
    assert len(words["story"]) == 5


def test_a_number_that_the_paper_does_not_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "headlines.yaml"
    headline = {"says": "a", "claims": ["tab5/no-gaps-*"], "short": "a", "finding": "b", "number": 0.123}
    headline["shown"] = "tab5/no-gaps-logistic-pima-diabetes"
    path.write_text(yaml.safe_dump({"pbrf": {"says": "", "found": "", "picture": "", "headlines": [headline]}}))
    refuses(r"number: 0\.123 stands in no paper_value of its claims", find, read_results(ROOT / "results"), path)

    for content in ("[", "lissa: 3", "lissa: {says: x}", "- a"):
        path.write_text(content)
        text = r"(?s)headlines\.yaml is damaged .*each paper needs says, found, picture"
        refuses(text, find, read_results(ROOT / "results"), path)


def test_a_headline_that_no_preset_has_judged_is_out_of_reach_and_counts_nothing(tmp_path: Path) -> None:
    path = tmp_path / "headlines.yaml"
    headline = {"says": "a", "claims": ["tab5/none"], "shown": "tab5/none", "short": "b", "finding": "c"}
    told = {
        "says": "",
        "found": "",
        "picture": "",
        "headlines": [headline | {"per": "1e-3"}],
    }  # as YAML reads 1e-3
    path.write_text(yaml.safe_dump({"pbrf": told}))
    (story,) = papers = find(read_results(ROOT / "results"), path)
    assert (story.findings[0].verdict, story.findings[0].headline.per) == ("out of reach", 1e-3)
    assert "out of reach" in {words.get_text() for words in forest(papers, {}).axes[0].texts}


def test_the_picture_and_the_readme_are_those_of_the_results(committed, tmp_path: Path) -> None:
    picture = forest(committed, {})
    plots.write_png(picture, tmp_path / "findings.png")  # fonts may differ: not compared by bytes
    findings = [finding for paper in committed for finding in paper.findings]
    texts = {text.get_text(): text.get_color() for text in picture.axes[0].texts}
    assert all(finding.headline.says in texts for finding in findings)
    beside = [text.get_text() for text in picture.axes[0].texts if text.get_text().startswith("paper: ")]
    assert len(beside) == sum(finding.shown is not None for finding in findings), "every row says the paper's"
    verdicts = {finding.verdict for finding in findings}
    colors = [{texts[each] for each in texts if each.startswith(f"{verdict}: ")} for verdict in verdicts]
    assert len(set().union(*colors)) == len(colors)
    assert all(len(own) == 1 for own in colors)
    picture.canvas.draw()
    boxes = [text.get_window_extent() for text in picture.axes[0].texts]
    assert all(box.x0 >= 0 and box.x1 <= picture.bbox.width for box in boxes), "no text is cut"
    rows = [[box for box in boxes if abs(box.y0 - own.y0) < 3] for own in boxes]
    for row in rows:
        row.sort(key=lambda box: box.x0)
        assert all(left.x1 <= right.x0 for left, right in itertools.pairwise(row)), "no text lies on another"
    assert (ROOT / "results" / "findings.png").is_file()
    folders = read_results(ROOT / "results")
    for document in PARTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        assert filled_readme(text, folders, committed, document) == text, f"run `make report`: {document} is stale"
        assert NO_VALUE not in text
    refuses("lacks the line", filled_readme, "", folders, committed)


def test_every_row_of_the_picture_has_its_preset_and_its_claims_numbers(committed) -> None:
    drawing = forest(committed, {})
    axes = drawing.axes[0]
    says = {text.get_text(): text.get_position()[1] for text in axes.texts}
    presets = {finding.preset for paper in committed for finding in paper.findings} - {""}
    assert {(preset[0].upper(), preset) for preset in presets} == {
        (letter.get_text(), name.get_text())
        for letter, name in itertools.pairwise(axes.texts)
        if letter.get_position()[1] == name.get_position()[1] == says["the preset that decides:"]
        and len(letter.get_text()) == 1
    }
    seen = 0
    for finding in (finding for paper in committed for finding in paper.findings):
        top = says[finding.headline.says]
        texts = {text.get_text() for text in axes.texts if top < text.get_position()[1] < top + 20}
        lines = [line for line in axes.lines if top < float(np.mean(line.get_ydata())) < top + 20]
        dots = [float(line.get_xdata()[0]) for line in lines if line.get_marker() == "o"]
        assert {finding.preset[:1].upper(), finding.headline.short} <= texts
        if finding.shown is None:
            assert dots == []
            continue
        seen += 1
        key, _, name = finding.headline.shown.rpartition("/")  # the file itself, and no class of ours
        claims = json.loads((ROOT / "results" / key / finding.preset / "claims.json").read_text())["claims"]
        (claim,) = (each for each in claims if each["claim"]["id"] == name)
        value, interval, per = claim["value"], claim["interval"], finding.headline.per
        ends = [interval["low"], interval["high"]]
        spread = f" ({written(per * ends[0])} to {written(per * ends[1])})" if ends[0] != ends[1] else ""
        assert f"{written(per * value)}{spread}" in texts
        (dot,) = dots
        (band,) = (
            part.get_paths()[0].get_extents()
            for part in axes.collections
            if to_hex(part.get_facecolor()[0]) == HOLDS and top < part.get_paths()[0].get_extents().y0 < top + 20
        )
        assert (band.x0 <= dot <= band.x1) == finding.shown.claim.criterion.holds([value]), finding.headline.says
        diamonds = [line.get_xdata() for line in lines if line.get_marker() == "D"]
        places = [float(place) for line in diamonds for place in line]
        assert len(places) == len(finding.headline.number)
        given = [*zip(finding.headline.number, places, strict=True), (per * value, dot)]
        assert [place for _, place in sorted(given)] == sorted(place for _, place in given)  # one scale for all
    assert seen > 30


def test_the_first_use_of_a_word_is_a_link_to_what_it_means() -> None:
    text = "# LiSSA\n`LiSSA` [LiSSA](x), Lissa, pre-LiSSA: LiSSA's batch; LiSSA again. Scaling; up to K(ε), K(ε)."
    told = with_words(text, "w.md")
    assert told == text.replace("LiSSA's", "[LiSSA](w.md#lissa)'s").replace(
        "Scaling; up to K(ε)", "[Scaling](w.md#scaling); up to [K(ε)](w.md#kε)"
    )
    everything = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    for word in ("scaling", "kε", "two-stage-leave-one-out", "smoothing", "energy", "preset"):
        assert everything.count(f"../docs/words.md#{word})") == 1, word


def test_the_board_reads_its_tasks_and_methods_from_the_tables() -> None:
    folders = [each for each in read_results(ROOT / "results") if each.key == "benchmarks/board"]
    words = yaml.safe_load(WORDS.read_text(encoding="utf-8"))
    board = Board(folders, words["board"], ours=words["ours"])
    assert len(board.table().splitlines()) == 2 + 8
    for page in ("README.md", "results/benchmarks/README.md"):
        assert board.table() in (ROOT / page).read_text(encoding="utf-8")
    table, ranks = (tables.read_table(folders[0].path, name) for name in ("best", "ranks"))
    own = table[(table.against == "standard") & (table.task == table.task[0])].set_index("method").lds
    assert f"| {own['unrolled']:.2f} (" in board.table().splitlines()[2]
    groups = ranks[ranks.task == table.task[0]].groupby(["network", "query"])
    each = [own["unrolled"].corr(own["influence, as many epochs"], method="spearman") for _, own in groups]
    assert board.agreement()["unrolled"] == pytest.approx(sum(each) / len(each), abs=2e-3)
    assert board.agreement()[board.ours] == pytest.approx(1)
    ends = [edge for each in folders for edge in tables.read_table(each.path, "best").edge.dropna()]
    assert sum(board.edges().count(word) for word in (": lowest", ": highest")) == len(ends)
    key = (board.first, board.ours, "standard")
    board.best[key] = board.best[key]._replace(edge="lowest")
    assert f"{own[board.ours]:.2f}{EDGE} (" in board.shown()
    assert board.shown().endswith(f"{EDGE}: at an end of its grid; another damping may do better.")
    ratios = []
    for folder in folders:
        cost = tables.read_table(folder.path, "cost").set_index(["task", "method"]).trainings
        tasks = [task for task, method in cost.index if method == "SOURCE with exact segments"]
        ratios += [cost[task, "SOURCE with exact segments"] / cost[task, board.ours] for task in tasks]
    assert board.dearer("SOURCE with exact segments") == f"{min(ratios):.0f} to {max(ratios):.0f}"
    refuses("the board has no 'voodoo', but", Board, folders, {"x": ["voodoo", "voodoo"]}, ours="x")


def test_each_library_stands_beside_the_exact_scores_of_its_own_matrix() -> None:
    folders = [each for each in read_results(ROOT / "results") if each.key == "benchmarks/attribution"]
    read = [tables.read_table(folder.path, "libraries") for folder in folders]
    table = [each for each in read if "matrix" in each][-1]
    lines = peers(folders).splitlines()
    assert len(lines) == 2 + table.method.nunique()
    last = table[table.method == table.method.iloc[-1]].sort_values("damping")
    assert lines[-1].startswith(
        f"| {last.method.iloc[0]} | {last.matrix.iloc[0]} | {last.pearson_mean.iloc[0]:.2f} | "
    )
    assert f" | {last.lds.iloc[1]:.2f} ({last.lds_low.iloc[1]:.2f}–" in lines[-1]


def test_the_papers_words_beside_the_picture_are_whole() -> None:
    assert paper_words(2.0, []) == "paper: 2"
    assert paper_words(None, []) == "paper: no number"
    assert paper_words("higher, no number", []) == "paper: higher"
    assert paper_words("word " * 30, []) == "paper: no number"  # never a part of what it says
    assert paper_words("word " * 30, [0.9, 0.98]) == "paper: 0.9 to 0.98"
