"""Headlines: verdicts and sentences; what W&B is told to show."""

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
from curvlab.lab.claims.claims import DIRECTION_ONLY, NOT_ASKED, NOT_REPRODUCED, REPRODUCED, UNDECIDED
from curvlab.lab.reporting.dashboard import headline_claims, text
from curvlab.lab.reporting.findings import HEADLINES, NO_VALUE, best_claims, find, headline_verdict, tell, written
from curvlab.lab.reporting.forest import _HOLDS as HOLDS
from curvlab.lab.reporting.forest import forest, paper_words
from curvlab.lab.reporting.readme import EDGE, PARTS, WORDS, Board, filled_readme, peers, with_words
from curvlab.lab.reporting.results import read_results
from curvlab.lab.tables import read_table
from curvlab.lab.targets.target import PRESETS, ROOT, all_targets, paper_titles
from tests.refusals import refuses

# --- One verdict and one sentence for each headline: the rule, the numbers of sentences, and the committed ones
CLAIM = Claim("c", "It holds.", "Sec. 1", "0.93 (Pearson)", "correlation", Criterion(at_least=0.9))
HELD = {"a/b/c": judge(CLAIM, 0.951, Interval(0.93, 0.97, "t 95 %, 3 seeds", 3), if_not_reproduced="-")}


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [
        ("o", "out of reach"), ("", "out of reach"), ("roo", "reproduced"), ("rrud", "direction only"),
        ("rrr ud", "reproduced"), ("ru", "undecided"), ("du", "undecided"), ("ddu", "direction only"),
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


# What to do because of it: a clause that begins with one of these, after a full stop, a colon or "on networks".
ADVICE = "check|compare|compute|do not|draw|expect|keep|look|measure|pay|plan|prefer|read|rely|say|score|state"
ADVISES = re.compile(rf"(?i)[.:] (on a? ?converged networks? )?({ADVICE}|take|try|use)\b|, take ")


def test_no_number_of_ours_is_typed_and_a_finding_has_one_and_an_advice() -> None:
    names = r"Eq\. 10|log10|T5|LeNet-5|Theorem 1|Lemma 1|takes 2"
    for paper, entry in yaml.safe_load(HEADLINES.read_text(encoding="utf-8")).items():
        for sentence in (entry["found"], *(headline["finding"] for headline in entry["headlines"])):
            assert len(re.findall(r"\{", sentence)) == 1, f"{paper}: {sentence}"
            assert ADVISES.search(sentence), f"{paper}: what to do? {sentence}"
            assert len(sentence.split()) <= 45, f"{paper}: {sentence}"
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


def test_number_words_of_findings_are_those_of_the_claims(committed) -> None:
    told = " ".join(HEADLINES.read_text(encoding="utf-8").split())
    claims = best_claims(read_results(ROOT / "results"))
    at = {(own.key, own.preset): own.claims for own in read_results(ROOT / "results")}
    length = {own.claim.id: own for own in at["pbrf/tab7", "laptop"] if own.claim.id.startswith("own-length-")}
    concrete, wider = (length[f"own-length-mlp-128-128-{name}"] for name in ("concrete", "energy"))
    assert [each.interval.num_samples for each in (concrete, wider)] == [20, 20]
    assert (concrete.verdict, wider.verdict) == (NOT_REPRODUCED, DIRECTION_ONLY)
    assert wider.value < claims["pbrf/tab6/own-length-mlp-128-128-energy"].value - 0.1
    longer = claims["pbrf/tab6/own-length-mlp-128-128-mnist-6000-faster"].interval
    assert longer.low < 0.9 < longer.high
    assert (
        "On MNIST it is as near where that is short, open where long; with the Hessian farther on Concrete" in told
    )
    energy = claims["pbrf/tab5/answers-another-question-mlp-128-128-energy"]
    assert energy.value < float(energy.claim.words["zero"]) < 1.2 * energy.value
    assert "but predicting no change would have about as little" in told
    tab8 = (at["pbrf/tab8", preset] for preset in ("laptop", "paper"))
    laptop, paper = ({each.claim.id.removesuffix("-mlp-128-128-energy"): each for each in own} for own in tab8)
    slow = [of["slow-two-stages"] for of in (paper, laptop)]
    assert [each.interval.num_samples for each in slow] == [8, 20]
    assert all(each.interval.low > 0 for each in slow)
    assert all(of["sign-kept"].value > 0.7 and of["sign-lost"].value < -0.7 for of in (paper, laptop))
    assert all(abs(of["two-stages"].value) < 0.2 for of in (paper, laptop))
    assert "at the PBRF's rate, hardly at the base training's. At the former it does more than warm start" in told

    def verdicts(start: str) -> list[str]:
        return [each.verdict for name, each in claims.items() if name.startswith(start)]

    folders = [own for own in read_results(ROOT / "results") if own.preset == "laptop"]
    figures = [own for own in folders if own.key in ("lissa/fig1", "lissa/fig2")]
    batch = {each.claim.id: each for own in figures for each in own.claims}
    batch = {name: each for name, each in batch.items() if re.match("(recipe-)?converges-", name)}
    worst, fitted = (batch[f"converges-mlp-64-{of}"] for of in ("64-mnist-6000-early", "tanh-mnist-2000"))
    assert 0.75 < worst.value < worst.claim.criterion.at_least
    assert abs(fitted.value - worst.value) < 0.05
    early = [name for name in batch if "-early" in name]
    assert [batch[name].verdict for name in early if name != worst.claim.id] == [REPRODUCED, REPRODUCED]
    assert len(early) == 3
    others = [each for name, each in batch.items() if name not in early and each != fitted]
    assert max(each.value for each in others) < 0.2
    assert "On three networks stopped early LiSSA" in told
    assert "on converged ones it does not, but for one that is partly fitted" in told
    scores = [
        each.verdict for name, each in claims.items() if re.match("ginger/tab2/.*-above-|ginger/tab2/qng-", name)
    ]
    assert {NOT_ASKED} == {*scores}
    fine_tuned = read_table(ROOT / "results/ginger/tab2/laptop", "table")
    start = read_table(ROOT / "results/ginger/tab2/laptop", "start")
    means = fine_tuned.groupby(["weights", "racer", "rank"], dropna=False).rouge.mean()
    assert means.max() < start.rouge[0]
    assert "fine-tuning lowers ROUGE" in told
    assert "mlp-8-tanh-digits -0.00;" in claims["lissa/thm1/printed-bound-uniform"].explanation
    assert "to the power {thm1/printed-bound-uniform}. On a trained network not" in told
    floors = "sweep == 'epsilon' and task == 'ffnn-64-mnist-10000'"
    by_floor = read_table(ROOT / "results/ngd/fig3/laptop", "summary").query(floors).set_index("value").llc
    assert by_floor[1e-6] > 0.99 * by_floor[1e-10]
    assert by_floor[1e-4] < 0.5 * by_floor[1e-6]
    assert "does nothing while small. Then it drops the LLC to less than half at once" in told
    assert set(verdicts("ngd/fig7/llc-increases-sgd")) == {UNDECIDED}
    tuning = read_table(ROOT / "results/ngd/fig1/laptop", "tuning").query(
        "chosen and task.str.contains('1-layer')"
    )
    config = json.loads((ROOT / "results/ngd/fig1/laptop/run.json").read_text())["config"]
    assert set(tuning.lr) == {config["optimizers"]["sgd"]["lr"]} == {config["optimizers"]["ngd"]["lr"]}
    assert "(with one the same rate)" in told
    assert (
        claims["ginger/tab1/training-loss-published-below-momentum-mlp-fashion-mnist"].interval.num_samples == 10
    )
    higher = claims["ngd/fig5/llc-plateaus-higher-ffnn-128-128-mnist-10000"]
    assert re.search(r"From each rate to the next: ngd-middle \+.*, ngd-high -", higher.explanation)
    assert higher.value < 0
    assert "on fewer images ten times its largest rate ends below that rate" in told.lower()
    assert "No plateau is reached" in claims["ngd/fig5/llc-plateaus-higher-ffnn-256-256-mnist"].explanation
    board = best_claims(read_results(ROOT / "results"))
    length = [each for name, each in board.items() if name.startswith("benchmarks/board/damping-is-the-length-")]
    assert len(length) == 9 * 3
    assert {each.claim.criterion.at_most for each in length} == {0.02}
    words = " ".join(WORDS.read_text(encoding="utf-8").split())
    for word in ("on none of nine tasks", "on nine tasks and by three protocols", "within two hundredths"):
        assert word in words
    assert claims["lissa/tab1/constant-two-saturated"].value > 2 * 10
    assert "C = 2, that fitted networks exceed by an order of magnitude" in told
    fail = [
        (own.key, each.claim.id)
        for own in read_results(ROOT / "results")
        if own.paper == "lissa" and own.preset == "laptop"
        for each in own.claims
        if each.verdict == NOT_REPRODUCED and each.claim.source.startswith("Klochkov")
    ]
    of_two = ("fig1/", "fig2/", "fig4/", "tab1/constant", "thm1/constant")
    assert (
        sum(f"{key}/{claim}".startswith(tuple(f"lissa/{of}" for of in of_two)) for key, claim in fail)
        > len(fail) / 2
    )
    assert "Most claims that fail are this one fact" in told


SIZES = {  # what is said without a number, and what it stands on
    "Two suffices for two networks stopped early": "1"
    " == fig1/recipe-converges-mlp-64-64-mnist-early-curvature-3000"
    " == fig1/recipe-converges-resnet20-cifar10-early-curvature-200",
    "on an MNIST MLP stopped early they agree": "fig1/agreement-mlp-64-64-mnist-early-curvature-3000 > 0.9",
    "more than half of it on Concrete": "tab5/influence-is-the-pbrf-mlp-128-128-concrete > 0.57",
    "On an autoencoder they are less than a quarter": "tab5/influence-is-the-pbrf-autoencoder-mnist-1000 < 0.25",
    "By the constant assumed it is fewer": "tab1/one-sequence < 256",
    "more than warm start": "tab8/slow-above-warm-start-mlp-128-128-energy > 0.2",
    "A rewording stands out more": "fig3/stands-out-more > 3",
    "On MNIST it is as near where that is short": "tab6/own-length-mlp-128-128-mnist-6000 > 0.95",
    "far less when solved to the end": "tab6/exact-mlp-128-128-energy < tab6/own-length-mlp-128-128-energy - 0.3",
    "The smallest scaling does worse": "tab6/smallest-scaling-mlp-128-128-energy"
    " < tab6/pbrf-mlp-128-128-energy - 0.1 > tab6/smallest-scaling-mlp-128-128-mnist-6000 + 0.2",
    "on MNIST their ranks agree by less than in the paper": "tab6/pbrf-ranks-mlp-128-128-mnist-6000 < 0.8",
    "as small as the paper's printed zero on Pima": "tab5/no-gaps-logistic-pima-diabetes < 0.001",
    "hardly at the base training's": "abs(tab8/two-stages-mlp-128-128-energy) < 0.2",
    "on Energy. That is a larger gap than the paper's": "tab8/slow-below-pbrf-mlp-128-128-energy > 0.33",
    "Influence solved exactly hardly correlates with it on either": "tab7/exact-mlp-128-128-energy"
    " < 0.2 > tab7/exact-mlp-128-128-concrete",
    "Once they are fitted it holds fewer": "fig6/influence-finds-most-mlp-128-128-mnist-600-overfitted"
    " < fig6/influence-finds-most-mlp-128-128-mnist-600 - 0.1",
    "From the trained weights it is no better": "tab6/warm-mlp-128-128-energy"
    " < tab6/cold-mlp-128-128-energy + 0.1",
    "with all weights less than a hundredth below": "0"
    " < tab2/perplexity-below-adam-full-t5-32-documentation < 0.01",
    "below Adam's and QNG's in nearly all": "tab1/training-loss-published-below-adam-mlp-fashion-mnist"
    " > 0.85 < tab1/training-loss-published-below-qng-mlp-fashion-mnist",
    "By the last epoch's mean Adam and QNG are lower": "1"
    " < tab1/training-loss-last-epoch-published-mlp-fashion-mnist",
    "those of LiSSA not at all": "abs(appg/step-independent-of-n-mlp-128-128-mnist-6000) < 0.01",
    "about as much with two": "abs(fig1/llc-higher-ffnn-2-layers-mnist-10000"
    " - fig1/llc-higher-ffnn-1-layer-mnist-10000) < 0.1",
    "an epoch, SGD by less": "fig4/llc-rises-faster-ffnn-256-256-fashion-mnist > 0",
    "far shorter than SGD's": "fig4/update-norm-steady-ffnn-256-256-fashion-mnist < 0.1",
    "on Concrete by less than in the paper": "tab7/pbrf-mlp-128-128-concrete < 0.85",
    "with the largest eigenvalue as λmax and H indefinite, too small": "prop/largest-eigenvalue > 1",
}


def test_words_of_size_are_those_of_the_claims() -> None:
    told = " ".join(HEADLINES.read_text(encoding="utf-8").split())
    values: dict[str, float] = {}
    for own in sorted(read_results(ROOT / "results"), key=lambda own: PRESETS.index(own.preset)):
        values |= {f"{own.key.split('/')[1]}/{each.claim.id}": each.value for each in own.claims}
    for words, fact in SIZES.items():
        assert words in told, words
        holds = re.sub(r"[a-z0-9]+/[a-z0-9-]+[a-z0-9]", lambda name: repr(values[name[0]]), fact)
        assert eval(holds), f"{words}: {fact}"  # noqa: S307 (the table above)


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
    texts = tables.read_table(folders[-1].path, "best").query("against == 'standard'").set_index("method")
    texts, told = texts[texts.task.str.contains("-ptb-")].lds, board.on_texts()
    assert told["words_standard"] == " and ".join(f"{lds:.2f}" for lds in texts["BM25"])
    assert told["influence_standard"] == " and ".join(f"{lds:.2f}" for lds in texts["influence, as many epochs"])
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


# --- What W&B is told to show: rebuilt equal without an account, and nothing of an account in it
@pytest.mark.parametrize("paper", paper_titles())
def test_what_is_committed_is_what_is_built(paper: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb_workspaces", reason="pip install 'curvlab[wandb]'")
    monkeypatch.setenv("HOME", str(tmp_path))  # no account
    for variable in ("WANDB_API_KEY", "WANDB_ENTITY"):
        monkeypatch.delenv(variable, raising=False)
    built = text(paper)
    path = ROOT / "results" / paper / "dashboard.json"
    assert path.read_text(encoding="utf-8") == built, "`make dashboard` writes it"
    assert len(built) < 150_000
    grids = [block for block in json.loads(built)["report"]["blocks"] if block["type"] == "panel-grid"]
    targets = [target.make_name for target in all_targets().values() if target.paper_key == paper]
    runs = [runset for grid in grids for runset in grid["metadata"]["runSets"]]
    assert [runset["name"] for runset in runs] == targets
    assert [runset for runset in runs if "project" in runset] == []  # of the report's project, whoever's it is
    assert "entity" not in built


def test_headlines_name_claims_of_the_sheet_or_all_of_a_task() -> None:
    found = headline_claims(all_targets()["lissa/tab1"])
    assert "constant-two" in found
    assert "agreement-*" in headline_claims(all_targets()["lissa/fig1"])
