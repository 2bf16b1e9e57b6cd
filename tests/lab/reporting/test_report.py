"""The pages of results: written from a made-up tree of results, and the committed ones current."""

import json
import math
import re
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml

from curvlab.lab import Claim, Criterion, Interval, exact, judge, out_of_reach, t_interval, tables
from curvlab.lab.claims.claim_sheet import save_claims
from curvlab.lab.claims.claims import Change, not_asked
from curvlab.lab.reporting.causes import PATTERNS, cause, own_claims
from curvlab.lab.reporting.findings import HEADLINES, NO_VALUE, find, picture_title
from curvlab.lab.reporting.report import build_report, main, pages
from curvlab.lab.reporting.results import read_results
from curvlab.lab.reporting.words import note, number_text, value_text
from curvlab.lab.targets.target import all_targets
from experiments.papers.derivations import DERIVATIONS, Derivation
from tests.refusals import refuses

ROOT = Path(__file__).parents[3]
COMMIT = {"commit": "0123456789abcdef0123456789abcdef01234567", "clean": True}
OTHER = {"commit": "fedcba9876543210fedcba9876543210fedcba98", "clean": False}
CORRELATES = Claim(
    id="correlates-mlp",
    statement="Influence and PBRF lie on x = y | <in time> (mlp).",
    source="Klochkov & Liu 2024, Fig. 1",
    paper_value="points along x = y",
    measure="Pearson correlation",
    criterion=Criterion(at_least=0.99, direction_at_least=0.5),
    changed=(Change("2026-11-20", "0.99 instead of 0.9"),),
)
GOOD = judge(CORRELATES, 0.998, Interval(0.995, 0.999, "t 95 %, 3 seeds", 3), if_not_reproduced="-")
HALF = judge(CORRELATES, 0.9, Interval(0.8, 0.95, "t 95 %, 3 seeds", 3), if_not_reproduced="Batch noise.")
OURS = Claim("ours", "Ours is faster.", "ours, no paper", None, "seconds", Criterion(at_most=1.0))
FAR = out_of_reach(OURS, "Needs a GPU.")


def another(result: Any, network: str) -> Any:
    """Return the same result on another network."""
    statement = result.claim.statement.replace("mlp", network)
    own = replace(result.claim, id=f"correlates-{network}", statement=statement)
    return judge(own, result.value, result.interval, if_not_reproduced="-")


def fill(folder: Path, claims: list[Any], **run: Any) -> None:
    folder.mkdir(parents=True)
    (folder / "table.csv").write_text("seed,value\n0,1\n")
    (folder / "figure.png").write_bytes(b"a picture")
    (folder / "figure_more.png").write_bytes(b"another")
    paper, item, preset = folder.parts[-3:]
    record = {
        "target": f"{paper}-{item}",
        "title": "LiSSA against PBRF",
        "command": f"make {paper}-{item} PRESET={preset}",
        "units": [{"name": "a", **COMMIT, "count": 41}, {"name": "b", **OTHER, "count": 3}],
        "assembled": COMMIT,
        "judged": COMMIT,
        "drawn": COMMIT,
        "settings": [{"name": "training images", "ours": [4998, 500], "paper": 1281167}],
        "reduced": ["CIFAR-10 instead of ImageNet"],
        "device": "a processor",
        "num_threads": 2,
        "unit_seconds": 5212.0,
        "wall_seconds": 2712.4,
        "peak_memory_bytes": 1_503_238_553,
        "num_matvecs": 123456,
    }
    (folder / "run.json").write_text(json.dumps(record | run))
    save_claims(folder, claims)


HEADLINES_YAML = """
lissa:
  says: It converges.
  found: By {fig1/correlates-mlp:%}, and {fig1/none}.
  picture: lissa/fig1
  easy: To get {fig1/correlates-mlp}.
  hard: The rest.
  leaves open: Why.
  headlines:
    - says: LiSSA gives the PBRF.
      claims: [fig1/correlates-*]
      short: correlation
      shown: fig1/correlates-mlp
      finding: It does, {fig1/correlates-mlp:interval}. Use it.
    - {says: Nothing., claims: [a/b/c], short: nothing, shown: a/b/c, finding: "No, {a/b/c}."}
pbrf: {says: "No results yet.", found: "", picture: pbrf/tab5, headlines: []}
"""


@pytest.fixture
def made_up(results: Path, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "headlines.yaml").write_text(HEADLINES_YAML)
    folders = read_results(results)
    return pages(folders, {paper.paper: paper for paper in find(folders, tmp_path / "headlines.yaml")})


@pytest.fixture
def results(tmp_path: Path) -> Path:
    root = tmp_path / "results"
    fill(root / "lissa/fig1/embedded", [HALF], units=[])
    fill(root / "lissa/fig1/laptop", [GOOD, FAR, another(GOOD, "lenet")])
    fill(root / "lissa/fig1/paper", [])  # computed, not judged
    fill(root / "lissa/tab3/embedded", [HALF])
    fill(root / "benchmarks/speed/embedded", [FAR])
    fill(root / "lissa/fig1/smoke", [HALF], title="must not be shown")
    fill(root / "lissa/fig1/laptop+model=mlp", [HALF], title="must not be shown")
    return root


def test_the_first_page_counts_the_papers_own_claims_at_the_largest_judged_preset(made_up: dict[str, str]) -> None:
    first = without_words(made_up["README.md"])
    # fig1 at laptop (2 of 3: one is ours), tab3 at embedded; the benchmark apart
    assert "| [Klochkov & Liu 2024](lissa/README.md) | 2 | 1 | 0 | 0 | 0 | 0 |" in first
    place = "lissa/README.md#lissa-fig1-lissa-against-pbrf"
    assert f"| LiSSA gives the PBRF. | [reproduced]({place}) | It does, 0.998 (0.995 to 0.999). Use it. |" in first
    assert "![lissa-fig1](lissa/fig1/laptop/figure.png)" in first
    assert "](benchmarks/README.md)" in first
    assert "bench-speed" not in first


def test_what_laptop_leaves_open_is_counted_by_its_reason(tmp_path: Path) -> None:
    """Of the paper's own claims: two that were decided, one undecided, one out of reach, three not asked."""
    claims = [another(GOOD, name) for name in ("decided", "far", "lenet", "mlp", "vgg", "vit", "resnet")]
    few = judge(claims[3].claim, 0.7, t_interval([0.2, 1.0, 0.9]), if_not_reproduced="By the first two.")
    assert few.verdict == "not asked here"
    assert (
        judge(claims[3].claim, 0.995, t_interval([0.99, 1.0]), if_not_reproduced="-").weighed == "not asked here"
    )
    wide = judge(claims[4].claim, 0.99, Interval(0.4, 1.0, "t 95 %, 3 seeds", 3), if_not_reproduced="The sign.")
    far = out_of_reach(claims[1].claim, "Needs a GPU.")
    unmeasured = not_asked(out_of_reach(claims[2].claim, "Not computed."), "It takes hours.")
    seen = replace(few, claim=claims[6].claim, explanation="Fine-tuning lowers it. Measured 0.995.")
    root = tmp_path / "results"
    fill(root / "lissa/fig1/laptop", [claims[0], far, unmeasured, few, wide, claims[5], seen])
    fill(root / "lissa/fig1/paper", [few])
    page = pages(read_results(root), {})["REPRODUCE.md"]
    assert "| Klochkov & Liu 2024 | 7 | 4 | 1 | 1 | 1 | 1 | 1 | 71 % |" in page


def test_a_papers_page_has_headlines_claims_settings_and_what_made_them(made_up: dict[str, str]) -> None:
    page = without_words(made_up["lissa/README.md"])
    place = "(#lissa-fig1-lissa-against-pbrf)"
    told = "reproduced | It does, 0.998 (0.995 to 0.999). Use it."
    assert f"| LiSSA gives the PBRF. | {told} | [lissa-fig1]{place} |" in page
    assert "| Nothing. | out of reach | No preset has judged it yet. |  |" in page
    for line in (
        "`make lissa-fig1 PRESET=laptop`, 5,212 s of CPU time on a processor, 2 threads; "
        "41 units from 01234567, 3 from fedcba98 with changes. [table.csv](fig1/laptop/table.csv), "
        "[figure_more.png](fig1/laptop/figure_more.png), ",
        "[embedded](fig1/embedded): 1 direction only.",
        "| Influence and PBRF lie on x = y \\| \\<in time> (mlp). | points along x = y "
        "| 0.998 [0.995, 0.999] (t 95 %, 3 seeds) | reproduced † "
        "| needed: at least 0.99 (direction: at least 0.5). |",
        "| the same: lenet | the same | 0.998 [",
        "| Ours is faster. |  | not measured | out of reach | needed: at most 1. Needs a GPU. |",
        "4 claims, each judged by its criterion and interval; of 3 (†) the criterion or measure was changed",
        "- lissa-fig1, 2026-11-20, 2 claims: ",
        "| training images | 4998, 500 | 1281167 |",
        "- CIFAR-10 instead of ImageNet",
    ):
        assert line in page, line
    assert "must not be shown" not in page
    parts = ["Scope", "Method", "Results", "What was easy", "What was hard", "What the paper leaves open"]
    assert [part for part in re.findall(r"^## (.*)$", page, re.MULTILINE) if part in parts] == parts
    assert "## What was easy\n\nTo get 0.998.\n" in page


def test_the_committed_pages_come_to_the_first_target_soon(committed: dict[str, str]) -> None:
    for name, page in committed.items():
        if name.endswith("/README.md"):
            before, _, after = page.partition("\n### ")
            assert len(before.split()) <= 250, name  # with the words of tables
            assert name.startswith("benchmarks/") or "| The paper says | here | we found | in |" in after
            assert name.startswith("benchmarks/") or "\n## Why claims are not reproduced\n" in after


@pytest.mark.parametrize(
    ("name", "verdict", "why"),
    [
        ("a/b/c", "undecided", "power"), ("a/b/c", "refuted", "refuted"), ("a/b/c", "reproduced", None),
        ("lissa/fig1/a-curvature-9", "not reproduced", "regime"), ("a/b/c", "not reproduced", "not explained"),
        ("rank1/rate/printed-bound", "refuted", "misprint"), ("lissa/tab1/printed-steps", "refuted", "rounding"),
        ("lissa/fig1/agreement-x-curvature-9", "refuted", "refuted"),
    ],
)  # fmt: skip
def test_a_claim_that_is_not_reproduced_has_a_cause_of_the_list(name: str, verdict: str, why: str | None) -> None:
    assert cause(name, verdict) == why


def test_every_cause_is_that_of_a_published_claim() -> None:
    told = {
        (f"{folder.key}/{result.claim.id}", cause(f"{folder.key}/{result.claim.id}", result.verdict))
        for folder in read_results(ROOT / "results")
        for result in own_claims(folder.paper, folder)
    }
    for why, patterns in yaml.safe_load(PATTERNS.read_text(encoding="utf-8")).items():
        for pattern in patterns:
            assert any(each == why and fnmatchcase(name, pattern) for name, each in told), pattern


def test_what_explains_a_claim_that_is_not_reproduced_is_published() -> None:
    found = {
        f"{own.key}/{each.claim.id} {own.preset}": each
        for own in read_results(ROOT / "results")
        for each in own.claims
    }
    holds = ["published-perplexity-below-adam-full", "published-perplexity-below-qng-lora"]
    names = [f"ginger/tab2/{name}-t5-32-documentation laptop" for name in holds]
    names.append("ginger/cost/cut-optimal laptop")
    assert {name: found[name].verdict for name in names} == dict.fromkeys(names, "reproduced")
    rates = tables.read_table(ROOT / "results/ngd/fig5/laptop", "summary").set_index(["task", "branch"])
    rates = rates.loc["ffnn-128-128-mnist-10000"]
    assert rates.llc_end["ngd-low"] < rates.llc_end["ngd-middle"] > rates.llc_end["ngd-high"]
    assert rates.train_loss_ratio["ngd-high"] < 0.02 < 0.4 < rates.train_loss_ratio["ngd-middle"]
    for name, each in found.items():
        if "-raw-ffnn-6-6-" in name and each.verdict == "not reproduced" and "laptop" in name:
            assert found[name.replace("-raw", "")].value > each.value / 5


def test_a_cause_outside_of_the_list_is_named(tmp_path: Path) -> None:
    (tmp_path / "causes.yaml").write_text("bad luck: [a/*]")
    arguments = cause, "a/b/c", "refuted", tmp_path / "causes.yaml"
    refuses("'bad luck' is no cause; the list is regime, reduced scale", *arguments)


def test_misprints_are_the_papers_own_statements_that_fail_as_printed(committed: dict[str, str]) -> None:
    page = committed["MISPRINTS.md"]
    assert "Proposition" in page
    assert "| misprint | [rank1-rate](rank1/README.md#rank1-rate" in page
    assert "bench-" not in page
    assert "| Rounding: " not in page
    rows = [line for line in page.splitlines() if re.search(r"\| (misprint|refuted) \|", line)]
    assert all("|  |" not in row for row in rows), "each says what holds instead: misprints.yaml"
    # one number, everywhere
    assert f"\n{len(rows)} statements that are false" in page
    assert f"**{len(rows)} printed statements are false as printed**" in (ROOT / "README.md").read_text()
    first = re.findall(r"(?m)^\| \[.*README.md\) \|(.*)\|$", committed["README.md"])
    assert sum(int(row.split("|")[4]) for row in first) == len(rows)
    every = "\n".join(committed.values())
    causes = re.findall(r"(?m)^\| (?:misprint|refuted) \| [^|]* \| (\d+) \|$", every)
    assert sum(map(int, causes)) == len(rows)
    for folder in read_results(ROOT / "results"):  # and a statement about rounding is none
        for result in folder.claims:
            if result.verdict == "refuted":
                why = cause(f"{folder.key}/{result.claim.id}", result.verdict)
                assert (why == "rounding") == result.claim.statement.startswith("Rounding:"), result.claim.id


@pytest.mark.parametrize("derivation", DERIVATIONS, ids=lambda each: f"{each.paper} {each.place}")
def test_a_derivation_holds_once_the_equation_is_mended_and_only_then(derivation: Derivation) -> None:
    assert derivation.check(True) == pytest.approx(derivation.holds, rel=1e-3, abs=1e-12)
    assert derivation.check(False) != pytest.approx(derivation.holds, rel=0.3, abs=0.01)


def test_derivations_have_the_values_that_pen_and_paper_give() -> None:
    seen = {each.place: each.check(False) for each in DERIVATIONS}
    assert seen["Sec. 2.2"] == pytest.approx(1 / math.log(1e4) ** 2)  # E[L] = 1/(2nβ)
    assert seen["Sec. 2.2, Eq. 20"] == pytest.approx(2, rel=1e-3)
    assert seen["Sec. 2.2, Eq. 21"] == pytest.approx(128)
    assert seen["App. B.4, Eq. 39"] == pytest.approx(2, rel=1e-3)
    assert seen["App. B.3, Eq. 30"] == 0  # below the threshold of the unsquared norm nothing moves
    assert seen["App. D.2, Table 8, caption"] == 3  # Concrete, Energy, FashionMNIST


# ------------------------------------------------------------------------------------ titles of pictures
def test_every_published_headline_picture_is_titled_by_what_was_found() -> None:
    for folder in read_results(ROOT / "results"):
        if folder.paper != "benchmarks" and folder.claims:
            title = picture_title(folder.key, folder.claims)
            assert NO_VALUE not in title
            assert title or folder.preset == "laptop", f"{folder.key}: no sentence of pictures.yaml can be told"


def test_a_picture_has_the_first_sentence_whose_claims_are_there(tmp_path: Path) -> None:
    path = tmp_path / "pictures.yaml"
    path.write_text('a/b: ["No {none}.", "It is {correlates-mlp:%} of {far}.", "It is {correlates-mlp:%}."]')
    assert picture_title("a/b", [GOOD, FAR], path) == "It is 99.8 %."  # FAR is out of reach
    assert picture_title("a/c", [GOOD], path) == ""
    undecided = judge(CORRELATES, 0.97, Interval(0.4, 0.998, "t 95 %, 3 seeds", 3), if_not_reproduced="-")
    assert undecided.verdict == "undecided"
    assert picture_title("a/b", [undecided], path) == "It is 97 (40 to 99.8) %."


def test_reproduce_has_every_result_with_its_cost(made_up: dict[str, str]) -> None:
    page = made_up["REPRODUCE.md"]
    row = "| `make lissa-fig1 PRESET=laptop` | a processor, 2 threads | 86.9 | 1,434 | 123,456 | 41 units"
    assert row in page
    assert page.count("| `make ") == 5


def links(page: str) -> list[str]:
    return re.findall(r"\]\(([^)]+)\)", page)


def without_words(page: str) -> str:
    return re.sub(r"\[([^]]+)\]\([./]*docs/words\.md#[^)]*\)", r"\1", page)


def headings(page: str) -> set[str]:
    lines = re.findall(r"(?m)^#+ (.*)$", page)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.fixture(scope="module")
def committed() -> dict[str, str]:
    folders = read_results(ROOT / "results")
    return pages(folders, {paper.paper: paper for paper in find(folders)})


def test_the_committed_pages_are_current(committed: dict[str, str]) -> None:
    for name, text in committed.items():
        path = ROOT / "results" / name
        assert path.is_file(), f"run `make report`: {name} is missing"
        assert path.read_text(encoding="utf-8") == text, f"run `make report`: {name} is stale"


def test_every_link_of_the_committed_pages_leads_somewhere(committed: dict[str, str]) -> None:
    for name, text in committed.items():
        for link in links(text):
            path, _, anchor = link.partition("#")
            there = ((ROOT / "results" / name).parent / path).resolve() if path else ROOT / "results" / name
            assert there.exists(), f"{name}: {link}"
            page = committed.get(there.relative_to(ROOT).as_posix().removeprefix("results/"), "")
            page = page or (there.read_text(encoding="utf-8") if there.suffix == ".md" else "")
            assert not anchor or anchor in headings(page), f"{name}: {link}"


def test_the_first_page_is_short_has_every_headline_and_lacks_no_value(committed: dict[str, str]) -> None:
    words = [w for w in committed["README.md"].split() if any(map(str.isalnum, w))]  # without bars of tables
    assert len(words) <= 1900
    for entry in yaml.safe_load(HEADLINES.read_text(encoding="utf-8")).values():
        for headline in entry["headlines"]:
            assert f"| {headline['says']} | [" in without_words(committed["README.md"])
    assert committed["README.md"].count("![") == 1 + len(yaml.safe_load(HEADLINES.read_text()))
    assert all("(no value)" not in text for text in committed.values())


# ------------------------------------------------------------------------------------ damage
@pytest.mark.parametrize(
    "content", ["{", "[]", '{"units": 3}', '{"settings": [["a", 3]]}', '{"units": [{}]}', None]
)
@pytest.mark.parametrize("name", ["claims.json", "run.json"])
def test_a_damaged_file_is_named_and_the_rest_is_shown(
    results: Path, name: str, content: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("curvlab.lab.reporting.plots.write_png", lambda figure, path: None)
    path = results / "lissa/fig1/laptop" / name
    path.unlink() if content is None else path.write_text(content)
    problem = build_report(results)[0]
    assert problem.startswith(f"results/lissa/fig1/laptop/{name} is {'missing' if content is None else 'damaged'}")
    assert problem.endswith("run `make lissa-fig1 PRESET=laptop` again.")
    page = (results / "lissa/README.md").read_text()
    assert f"**Damaged:** {problem}" in page
    assert "[embedded](tab3/embedded)" not in page
    assert "### lissa-tab3: LiSSA against PBRF" in page
    assert str(results.parent) not in page


def test_a_run_that_was_killed_before_it_was_drawn_is_a_problem(results: Path) -> None:
    path = results / "lissa/fig1/laptop/run.json"
    record = json.loads(path.read_text())
    del record["drawn"]
    path.write_text(json.dumps(record))
    assert "results/lissa/fig1/laptop was not drawn: run" in build_report(results)[0]


def test_main_writes_the_same_bytes_again(results: Path, capsys: Any) -> None:
    assert main(results) == 0
    assert capsys.readouterr().out == f"{results.as_posix()}/README.md, with a page for each paper\n"
    before = {path: path.read_bytes() for path in results.rglob("*.md")}
    main(results)
    assert {path: path.read_bytes() for path in results.rglob("*.md")} == before
    assert main(results / "nowhere") == 2
    assert "make a target first" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ words
def test_numbers_have_four_digits() -> None:
    values = [None, math.nan, "as it is", True, 3, 3.0, 1281167, -0.0, 0.123456, 1e-8, 2.5e6]
    texts = ["", "", "as it is", "True", "3", "3", "1281167", "0", "0.1235", "1e-08", "2.5e+06"]
    assert [*map(number_text, values)] == texts


def test_values_have_their_interval() -> None:
    def of(value: float, interval: Interval) -> str:
        return value_text(judge(CORRELATES, value, interval, if_not_reproduced="-"))

    assert of(1.5, exact(1.5)) == "1.5 (deterministic)"
    assert of(1.5, Interval(math.nan, math.nan, "1 seed", 1)) == "1.5 (no interval: 1 seed)"
    assert of(0.7, Interval(0.5, math.inf, "3 seeds", 3)) == "0.7 [0.5, inf] (3 seeds)"


def test_notes_repeat_no_measured_number_and_are_cut_between_words() -> None:
    assert note(HALF) == "needed: at least 0.99 (direction: at least 0.5). Batch noise."
    long = judge(CORRELATES, 0.1, exact(0.1), if_not_reproduced="word " * 100)
    assert note(long).endswith("word …")
    assert len(note(long)) < 250


def test_what_reasons_cite_is_there() -> None:
    targets = {target.make_name for target in all_targets().values()}
    for folder in read_results(ROOT / "results"):
        for result in folder.claims:
            cited = re.findall(r"\b([\w-]+)\.csv\b", result.explanation)
            assert set(cited) <= set(tables.names(folder.path)), (folder.key, result.claim.id)
            cited = re.findall(r"\b(?:lissa|pbrf|ginger|rank1|bench)-(?:tab|fig|app)\w+\b", result.explanation)
            assert set(cited) <= targets, (folder.key, result.claim.id)
