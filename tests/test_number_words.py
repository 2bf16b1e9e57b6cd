"""Number words of the documents: each stands in a phrase that is tied to a fact, or is counted here."""

import re
import runpy
from collections.abc import Callable
from functools import cache

import pandas as pd
import pytest
import yaml

from curvlab.lab.claims.claims import ClaimResult
from curvlab.lab.claims.intervals import MIN_SAMPLES
from curvlab.lab.reporting.findings import HEADLINES, best_claims
from curvlab.lab.reporting.readme import AGAINST, BM25, STANDARD, WORDS
from curvlab.lab.reporting.results import read_results
from curvlab.lab.targets.target import ROOT, paper_titles

BENCHMARKS = ROOT / "results" / "benchmarks"
ONES = "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\\w+teen"
TENS = "(?:twen|thir|for|fif|six|seven|eigh|nine)ty"
PARTS = "half|halves|halved|third|quarter|fifth|sixth|eighth|tenth|hundredth|thousandth"
POWERS = "twice|thrice|double|triple|dozen|hundred|thousand|million|billion|trillion|per ?cent"
NUMBER = re.compile(rf"(?i)\b(?:{ONES}|{TENS}|{PARTS}|{POWERS})s?\b")


@cache
def claims() -> dict[str, ClaimResult]:
    return best_claims(read_results(ROOT / "results"))


@cache
def best_lds() -> pd.DataFrame:
    """Return bench-board's LDS of each task and protocol, a column a method."""
    read = [pd.read_csv(BENCHMARKS / "board" / preset / "best.csv.bz2") for preset in ("embedded", "laptop")]
    return pd.concat(read).pivot(index=["task", "against"], columns="method", values="lds")


def board(key: str) -> object:
    return yaml.safe_load((ROOT / "conf" / "benchmarks" / "board.yaml").read_text(encoding="utf-8"))[key]


def leads_on_texts() -> dict[tuple[str, str], bool]:
    """Return by task of texts and protocol whether influence is above BM25."""
    texts = best_lds().dropna(subset=BM25)
    return (texts["influence, as many epochs"] > texts[BM25]).to_dict()


def scale() -> pd.DataFrame:
    found = pd.read_csv(BENCHMARKS / "scale" / "laptop" / "scale.csv")
    return found[found.method == "influence, block CG"].set_index("task")


def solved_and_stopped() -> bool:
    solved, stopped = scale().loc["mlp-2200-2200-2200-digits"], scale().loc["opt-12-768-ptb"]
    sizes = [round(each.parameters / 1e6) for each in (solved, stopped)]
    return (
        sizes == [10, 88]
        and solved.status == "done"
        and stopped.status.startswith("stopped")
        and (stopped.weights == "random" and solved.weights == "trained")
    )


def within_the_grid() -> bool:
    own = [each for name, each in claims().items() if name.startswith("benchmarks/board/damping-is-the-length-")]
    return len(own) == 9 * len(AGAINST) and max(each.value for each in own) < 0.03


def traces() -> tuple[int, int]:
    """Return how many bad settings docs/howto.md shows, and of how many chains."""
    words = runpy.run_path(str(ROOT / "docs" / "bad_traces.py"))["WORDS"]
    (chains,) = re.findall(r'"num_chains": (\d+)', (ROOT / "docs" / "bad_traces.py").read_text(encoding="utf-8"))
    return len(words), int(chains)


# What is said, and what it stands on.
FACTS: dict[str, dict[str, Callable[[], bool]]] = {
    "README.md": {
        "Five papers": lambda: len(paper_titles().keys() - {"benchmarks"}) == 5,
        "at ten million parameters it was solved, at 88 million (random weights) it was stopped before its end": (
            solved_and_stopped
        ),
    },
    "readme.yaml": {
        "The batch's constant, two in the paper, is at least": lambda: (
            claims()["lissa/tab1/constant-two"].claim.criterion.at_most == 2
        ),
        "a small CIFAR MLP that converged at a high loss": lambda: (
            pd.read_csv(ROOT / "results/lissa/tab1/laptop/table.csv")
            .query("constant_at_least == @claims()['lissa/tab1/constant-two'].value.__round__(4)")
            .pipe(lambda own: own.task.item() == "mlp-8-tanh-cifar10" and own.train_loss.item() > 1)
        ),
        "on none of nine tasks is the best of a grid much better": within_the_grid,
        "the same, mean of three others": lambda: board("num_averaged") == 3,
        "averaged over three other trainings": lambda: board("num_averaged") == 3,
        "TRAK over ten networks": lambda: board("peers")["TRAK, 10 other networks"]["networks"] == 10,
        "by the standard protocol BM25, which compares words, is above influence on a small OPT (ptb). By the"
        " other two protocols influence is above BM25 on this OPT and on a small GPT-2 (ptb-gpt2)": lambda: all(
            leads == (against != STANDARD)
            for (task, against), leads in leads_on_texts().items()
            if task.startswith("opt") or against != STANDARD
        ),
    },
    "CHANGELOG.md": {"fewer than three seeds": lambda: MIN_SAMPLES == 3},
    "docs/enter.md": {
        "two small language models": lambda: len(leads_on_texts()) == 2 * len(AGAINST),
        "By the other two protocols influence is first on both": lambda: all(
            leads for (_, against), leads in leads_on_texts().items() if against != STANDARD
        ),
        "each of the three, (3, queries": lambda: board("num_networks") == 3,
        "by drawing all three anew": lambda: board("num_networks") == 3,
    },
    "docs/howto.md": {
        "the last six panels": lambda: traces()[0] == 6,
        "Loss of four chains in seven settings: one good, six bad": lambda: traces() == (6, 4),
    },
    "docs/limitations.md": {"costs alone were measured up to 88 million": solved_and_stopped},
}
# Definitions, arithmetic, what the sentence itself lists, and what test_documents and test_words_of_findings hold.
COUNTED = {
    "README.md": "half half",
    "readme.yaml": "halves halves",
    "headlines.yaml": "halves three two",
    "CHANGELOG.md": "half two",
    "CONTRIBUTING.md": "four",
    "docs/claims.md": "two two",
    "docs/concepts.md": "two",
    "docs/enter.md": "three ten four two two two",
    "docs/howto.md": "two",
    "docs/library.md": "half",
    "docs/limitations.md": "two million",
    "docs/running.md": "two two",
    "docs/scale.md": "three four five half two six five twice five six half three half ten ten million twelve"
    " million two fifth ten million two five twice ten ten million hundred hundred million four eight two tenth"
    " third ten two fifty thousand hundred",
    "docs/words.md": "two two two eight halved halves half half",
}


def said_in(name: str) -> str:
    """Return what is typed in a document: of the sheets behind README what it tells, of pages what is no code."""
    if name == "readme.yaml":
        sheet = yaml.safe_load(WORDS.read_text(encoding="utf-8"))
        told = [*sheet["story"], *(sheet[key] for key in ("times", "which", "protocols", "more"))]
        text = re.sub(r"\{[^{}]*\}", "", "\n".join([*told, *sheet["survivors"], *sheet["board"]]))
        return " ".join(text.split())
    if name == "headlines.yaml":
        papers = yaml.safe_load(HEADLINES.read_text(encoding="utf-8")).values()
        return " ".join(re.sub(r"\{[^{}]*\}", "", paper["found"]) for paper in papers)
    text = (ROOT / name).read_text(encoding="utf-8")
    return " ".join(re.sub(r"```.*?```|<!-- (\w+): .*?<!-- \1 end -->", "", text, flags=re.DOTALL).split())


@pytest.mark.parametrize("name", COUNTED)
def test_number_words_are_tied_to_facts_or_counted(name: str) -> None:
    told = said_in(name)
    for phrase, holds in FACTS.get(name, {}).items():
        assert phrase in told, phrase
        assert holds(), phrase
        told = told.replace(phrase, "")
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", told)
    assert " ".join(NUMBER.findall(prose)).lower() == COUNTED[name]


def test_every_document_is_looked_at() -> None:
    pages = {path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))}
    silent = {name for name in pages - set(COUNTED) if not NUMBER.findall(said_in(name))}
    assert pages - silent <= set(COUNTED)
