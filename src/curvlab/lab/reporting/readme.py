"""The parts of README.md and docs/enter.md that are made of results: story, papers, times, board of attribution.

A part stands between `<!-- NAME: written by `make report` -->` and `<!-- NAME end -->`; the rest is typed. Its
words and the rows of the board are those of experiments/papers/readme.yaml.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from curvlab.lab import tables
from curvlab.lab.claims.claims import ClaimResult
from curvlab.lab.reporting.causes import false_statements
from curvlab.lab.reporting.findings import HEADLINE_VERDICTS, PaperFindings, best_claims, tell, written
from curvlab.lab.reporting.results import ResultFolder, largest_judged
from curvlab.lab.targets.help import MINUTES
from curvlab.lab.targets.target import ROOT, paper_titles

WORDS = ROOT / "experiments" / "papers" / "readme.yaml"
GLOSSARY = ROOT / "docs" / "words.md"
_NO_PROSE = re.compile(r"!?\[[^\]]*\]\([^)]*\)|`[^`]*`|(?m:^(?:#|[*]{2}Damaged|!\[).*$)")
STANDARD, SAME_SEED = "standard", "same seed"
AGAINST = (SAME_SEED, "other seeds", STANDARD)
BM25, EDGE = "BM25", "‡"
PARTS = {"README.md": ("story", "papers", "times", "board"), "docs/enter.md": ("which", "survivors", "peers")}


def filled_readme(
    readme: str, folders: Sequence[ResultFolder], papers: Sequence[PaperFindings], document: str = "README.md"
) -> str:
    """Return the text of a document, README.md or another of `PARTS`, with its parts as the results have them."""
    words, board = _words(), board_of(folders)
    numbers = board.settings | {
        "clipped": clipped(folders[0].path.parents[2], words["clipped"]),
        "false": str(len([each for own in _by_paper(folders).items() for each in false_statements(*own)])),
        "gap": written(board.gap),
        "shipped": f"{board.best[board.first, 'TRAK as shipped', STANDARD].lds:.2f}",
        "dearer": board.dearer(words["board"]["SOURCE, segments solved exactly"][0]),
        **measured_times(),
    }
    claims = best_claims(folders)

    def told(sentence: str) -> str:
        return tell("", re.sub(r"\{(\w+)\}", lambda match: numbers[match[1]], sentence), claims)

    parts = {
        "story": "\n".join(f"{place}. {told(each)}" for place, each in enumerate(words["story"], start=1)),
        "papers": papers_table(papers),
        "times": told(words["times"]),
        "board": "\n\n".join([told(words["which"]), board.shown(), words["more"]]),
        "which": told(words["which"]),
        "survivors": f"{survivors(words['survivors'], claims)}\n\n{board.edges()}",
        "peers": peers([folder for folder in folders if folder.key == "benchmarks/attribution"]),
    }
    if document == "README.md":  # one page: the second part does not link what the first has linked
        linked = with_words("\0".join(parts[name] for name in PARTS[document]), "docs/words.md")
        parts |= dict(zip(PARTS[document], linked.split("\0"), strict=True))
    for name in PARTS[document]:
        part = parts[name]
        begin, end = f"<!-- {name}: written by `make report` -->", f"<!-- {name} end -->"
        if begin not in readme or end not in readme:
            raise ValueError(
                f"{document} lacks the line {begin!r} or {end!r}; put both back, the part goes between them"
            )
        whole = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        readme = whole.sub(lambda _, b=begin, p=part, e=end: f"{b}\n{p}\n{e}", readme)  # type: ignore[misc]
    return readme


def board_of(folders: Sequence[ResultFolder]) -> Board:
    """Return the board of these result folders, with the rows of readme.yaml."""
    words, own = _words(), [folder for folder in folders if folder.key == "benchmarks/board"]
    return Board(own, words["board"], ours=words["ours"], about=words["protocols"])


def measured_times() -> dict[str, str]:
    """Return on how many cores `make figures` and `make test` were timed, and the minutes of each."""
    times = json.loads(MINUTES.read_text(encoding="utf-8"))
    return {"cores": str(times["cores"])} | {
        f"minutes_{name}": f"{own['real']:.0f}" for name, own in times["minutes"].items()
    }


def _words() -> dict[str, Any]:
    words: dict[str, Any] = yaml.safe_load(WORDS.read_text(encoding="utf-8"))
    return words


def with_words(text: str, glossary: str) -> str:
    """Return a page in which the first use of each word that docs/words.md explains is a link to it there.

    Args:
        text: Markdown; headings, links and code stay as they are.
        glossary: the path of docs/words.md, as the page sees it.
    """
    for word in re.findall(r"(?m)^## (.*)$", GLOSSARY.read_text(encoding="utf-8")):
        start, anchor = word[0], re.sub(r"[^\w\- ]", "", word.lower()).replace(" ", "-")
        use = re.compile(rf"(?<![\w-])[{start.lower()}{start}]{re.escape(word[1:])}(?![\w-])")
        kept = [found.span() for found in _NO_PROSE.finditer(text)]
        for found in use.finditer(text):
            if not any(first <= found.start() < last for first, last in kept):
                link = f"[{found[0]}]({glossary}#{anchor})"
                text = text[: found.start()] + link + text[found.end() :]
                break
    return text


def papers_table(papers: Sequence[PaperFindings]) -> str:
    """Return the table of the papers: their headlines by verdict, without ours, and what was found."""
    titles = paper_titles()
    rows = []
    for paper in papers:
        counts = Counter(each.verdict for each in paper.findings if not each.headline.is_ours)
        words = ", ".join(f"{counts[word]} {word}" for word in HEADLINE_VERDICTS if counts[word])
        page = f"[{titles[paper.paper].partition(':')[0]}](results/{paper.paper}/README.md)"
        rows.append((page, words, paper.text))
    return "\n".join(tables.markdown(("paper", "its headlines", "what we found"), rows))


def survivors(sentences: Mapping[str, str], claims: Mapping[str, ClaimResult]) -> str:
    """Return on how many tasks each sentence holds, and on how many its opposite does, by what judges."""
    rows = []
    for sentence, claim in sentences.items():
        cells = []
        for against in AGAINST:
            of = f"benchmarks/board/{claim}-*{against}"
            told = f"{{{of}:count reproduced}} of {{{of}:count}}, against {{{of}:count not reproduced}}"
            known = any(fnmatchcase(own, of) for own in claims)
            cells.append(tell("", told, claims) if known else "not asked")
        rows.append((sentence, *cells))
    return "\n".join(tables.markdown(("sentence", *AGAINST), rows))


def peers(folders: Sequence[ResultFolder]) -> str:
    """Return what the public libraries' scores are beside exact ones of their own matrix, and beside retraining.

    Of the largest preset whose table says which matrix a method has.
    """
    read = [tables.read_table(folder.path, "libraries") for folder in folders]
    table = [each for each in read if "matrix" in each][-1]
    both = [
        f"{name} at {damping:.2g}" for damping in sorted(table.damping.unique()) for name in ("agreement", "LDS")
    ]
    rows = []
    for (method, matrix), own in table.groupby(["method", "matrix"], sort=False):
        cells = []
        for row in own.sort_values("damping").to_dict("records"):
            lds = f"{row['lds']:.2f} ({row['lds_low']:.2f}–{row['lds_high']:.2f})"
            agreement = f"{row['pearson_mean']:.2f}"
            if math.isnan(row["pearson_mean"]):
                agreement = f"exact solution not found: residual {row['reference_residual']:.1g}"
            cells += [agreement, lds] if row["status"] == "done" else [str(row["status"]), ""]
        seconds = own.seconds.mean()
        cells.append("" if math.isnan(seconds) else f"{seconds:,.0f}")
        rows.append([str(method), str(matrix), *cells])
    return "\n".join(tables.markdown(("method", "matrix", *both, "CPU s"), rows))


def clipped(results: Path, of: Mapping[str, Any]) -> str:
    """Return the shares of clipped entries of a racer's last steps, the least and the largest of all folders."""
    shares: list[float] = []
    for folder in of["folders"]:
        table = tables.read_table(results / folder, "clipped")
        own = table[table.racer == of["racer"]]
        shares += own[own.step == own.step.max()].share.tolist()
    return f"{math.floor(100 * min(shares))} to {math.floor(100 * max(shares))} %"  # all but 100 % is not 100 %


def _by_paper(folders: Sequence[ResultFolder]) -> dict[str, list[ResultFolder]]:
    papers = dict.fromkeys(folder.paper for folder in folders if folder.paper != "benchmarks")
    return {paper: largest_judged(own for own in folders if own.paper == paper) for paper in papers}


class Board:
    """The board of attribution: LDS of each score by task, its agreement with exact influence, and its price.

    Args:
        folders: bench-board's, of every preset.
        rows: by label, the method by the standard protocol and that by single runs.
        ours: the row of exact influence.
        about: what the table shows, in which {num_...} stand for settings.
    """

    def __init__(
        self, folders: Sequence[ResultFolder], rows: Mapping[str, Sequence[str]], *, ours: str, about: str = ""
    ) -> None:
        self.folders, self.rows, self.ours, self._about = folders, rows, rows[ours][0], about
        best = self._read("best")
        self.best: dict[tuple[str, str, str], Any] = {
            (str(row.task), str(row.method), str(row.against)): row for row in best.itertuples()
        }
        for method in (method for pair in rows.values() for method in pair):
            if method not in set(best.method):
                raise ValueError(f"readme.yaml: the board has no {method!r}, but {', '.join(set(best.method))}")
        banks = {  # by the task's name in the tables
            name.replace("_", "-"): str(task.get("bank") or name)
            for folder in folders
            for name, task in folder.record["config"]["tasks"].items()
        }
        self.tasks = {str(task): banks[task] for task in dict.fromkeys(best.task)}
        self.first = next(iter(self.tasks))
        self.texts = {task for task, method, _ in self.best if method == BM25}
        config = folders[0].record["config"]
        self.settings = {name: str(value) for name, value in config.items() if name.startswith("num_")}

    def _read(self, name: str) -> pd.DataFrame:
        return pd.concat([tables.read_table(folder.path, name) for folder in self.folders])

    @property
    def gap(self) -> float:
        """How far exact influence is at most below a task's best row, by the standard protocol; texts left out."""
        methods = [pair[0] for pair in self.rows.values()]
        gaps = []
        for task in self.tasks.keys() - self.texts:
            lds = [self.best[key].lds for method in methods if (key := (task, method, STANDARD)) in self.best]
            gaps.append(max(lds) - self.best[task, self.ours, STANDARD].lds)
        return float(max(gaps))

    def dearer(self, method: str) -> str:
        """Return the price of a method over that of exact influence, the least and the largest of the tasks."""
        prices = self._read("cost").pivot(index="task", columns="method", values="trainings")
        return _span((prices[method] / prices[self.ours]).dropna(), " to ")

    def agreement(self) -> dict[str, float]:
        """Return by method the rank correlation of its predictions with those of exact influence, first task."""
        ranks = self._read("ranks")
        ranks = ranks[ranks.task == self.first].sort_values(["network", "query", "half"])
        num_halves = ranks.half.nunique()

        def standardised(column: str) -> np.ndarray:
            own = ranks[column].to_numpy().reshape(-1, num_halves)
            own = own - own.mean(1, keepdims=True)
            return own / np.linalg.norm(own, axis=1, keepdims=True)

        found = {}
        for method in (pair[0] for pair in self.rows.values()):
            damping = self.best[self.first, method, STANDARD].damping
            column = method if math.isnan(damping) else f"{method} @ {damping:g}"
            found[method] = float((standardised(column) * standardised(self.ours)).sum(1).mean())
        return found

    def edges(self) -> str:
        """Return which methods' best damping is an end of their grid, by task and column."""
        found: dict[str, list[str]] = {}
        for (task, method, against), row in self.best.items():
            if isinstance(row.edge, str):
                found.setdefault(f"{method} on `{self.tasks[task]}`", []).append(f"{against}: {row.edge}")
        ends = "; ".join(f"{name} ({', '.join(columns)})" for name, columns in found.items()) or "none"
        return f"Best at an end of its grid, so that another damping may do better: {ends}."

    def shown(self) -> str:
        """Return the table with what it shows, and what its mark means where it has one."""
        table = self.table()
        mark = [f"{EDGE}: at an end of its grid; another damping may do better."] if EDGE in table else []
        return "\n\n".join([self._about.format(**self.settings).strip(), table, *mark])

    def table(self) -> str:
        """Return the rows: LDS by the standard protocol for each task, the rest for the first or as a mean."""
        prices, agreement = self._read("cost").groupby("method"), self.agreement()
        name = self.tasks[self.first]
        heads = [
            "score",
            *self.tasks.values(),
            "same seed, mean",
            f"agreement, {name}",
            "price, one damping",
            "grid",
        ]
        rows = []
        for label, (standard, single) in self.rows.items():
            keys = [(task, single, SAME_SEED) for task in self.tasks]
            same = [self.best[key].lds for key in keys if key in self.best]
            cells = [self._cell((task, standard, STANDARD)) for task in self.tasks]
            cells.append(f"{sum(same) / len(same):.2f}" if len(same) == len(keys) else "")
            own = prices.get_group(standard)
            cells += [f"{agreement[standard]:.2f}", *map(_span, (own["trainings of one damping"], own.trainings))]
            rows.append((label, *cells))
        return "\n".join(tables.markdown(heads, rows))

    def _cell(self, key: tuple[str, str, str]) -> str:
        if key not in self.best:
            return ""
        found = self.best[key]
        mark = EDGE if isinstance(found.edge, str) else ""
        return f"{found.lds:.2f}{mark} ({found.lds_low:.2f}–{found.lds_high:.2f})"


def _span(values: pd.Series, joint: str = "–") -> str:
    """Return the least and the largest, or one where they are alike, without digits behind the point."""
    return joint.join(dict.fromkeys(f"{end:.0f}" for end in (values.min(), values.max())))
