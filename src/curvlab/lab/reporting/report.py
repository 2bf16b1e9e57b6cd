"""The pages of results: `python -m curvlab.lab.reporting.report` writes them and scoreboard.csv under results/.

index.html has the headlines and the scoreboard; every paper has a page of its own with its targets,
<paper>/index.html. They link the figures and tables that lie beside them, so that a commit does not hold them
twice, and are read from files, without server or network. `--single-file FILE` writes one page with all of it,
figures inside. Nothing but the result folders and the papers' numbers goes into them: the same results give the
same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from omegaconf import OmegaConf
from yaml import YAMLError

from curvlab.files import write_atomically
from curvlab.lab.reporting import display
from curvlab.lab.reporting.claims import VERDICTS, ClaimResult, rerun_command
from curvlab.lab.reporting.display import DisplayTable, PageImage, embed_image, link_image
from curvlab.lab.reporting.paper_numbers import load_paper_numbers
from curvlab.lab.reporting.results import ResultFolder, read_results
from curvlab.lab.targets.target import paper_titles

PAPERS = Path("experiments/papers")
HEADLINES = "headlines.yaml"


@dataclass(frozen=True)
class Section:
    """One target at one preset, ready to be shown."""

    folder: ResultFolder
    figures: tuple[PageImage, ...]
    table: DisplayTable | None
    settings: DisplayTable | None
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Target:
    """A target with the paper's own numbers and its presets."""

    name: str
    anchor: str
    title: str
    numbers: DisplayTable | None
    sections: tuple[Section, ...]


@dataclass(frozen=True)
class Paper:
    """A paper with its headline claims, what was found on each, its targets, and the count of its verdicts."""

    key: str
    title: str
    headlines: tuple[tuple[Headline, tuple[Finding, ...]], ...]
    targets: tuple[Target, ...]
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Report:
    """What was written, and a sentence for every file that is missing or damaged.

    `page` is the first page; `pages` are the papers' own, none with a single file.
    """

    page: Path
    pages: tuple[Path, ...]
    scoreboard: Path
    problems: tuple[str, ...]


def build_report(
    results: str | Path, *, papers: str | Path = PAPERS, single_file: str | Path | None = None
) -> Report:
    """Write scoreboard.csv, index.html and <paper>/index.html into `results`; damaged files are named, not fatal.

    Args:
        results: the folder with <paper>/<item>/<preset>/.
        papers: the folder with the papers' numbers and headlines.yaml; what is not there is left out.
        single_file: write one page here instead, with the figures inside; must lie outside `results`.
    """
    results = Path(results).resolve()
    page = results / "index.html" if single_file is None else Path(single_file).resolve()
    if single_file is not None and page.is_relative_to(results):
        raise ValueError(
            f"{page.name} would lie inside {results.name}/, whose files are published; choose a path outside it."
        )
    folders = read_results(results)
    board = scoreboard(folders)
    problems: list[str] = []
    try:
        headlines = load_headlines(papers)
    except ValueError as error:
        headlines = {}
        problems.append(str(error))

    def image(folder: ResultFolder, path: Path) -> PageImage:
        return link_image(path, results / folder.paper) if single_file is None else embed_image(path)

    shown = tuple(
        _paper(key, list(members), Path(papers), headlines.get(key, ()), image)
        for key, members in groupby(folders, lambda folder: folder.paper)
    )
    for paper in shown:
        problems += [
            problem for target in paper.targets for section in target.sections for problem in section.problems
        ]
    environment, is_linked = _environment(), single_file is None
    html = environment.get_template("report.html").render(
        papers=shown,
        counts=verdict_counts(board),
        presets=list(dict.fromkeys(folder.preset for folder in folders)),
        problems=problems,
        is_linked=is_linked,
    )
    pages = {}
    if is_linked:
        template = environment.get_template("paper.html")
        pages = {
            results / paper.key / "index.html": template.render(paper=paper, is_linked=True) for paper in shown
        }
    for path, text in {page: html, **pages}.items():
        write_atomically(path, text.encode())
    return Report(page, tuple(pages), write_scoreboard(board, results), tuple(problems))


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("curvlab.lab.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(display=display, verdicts=VERDICTS, count_verdicts=count_verdicts)
    return environment


def _paper(
    key: str,
    folders: Sequence[ResultFolder],
    papers: Path,
    headlines: Sequence[Headline],
    image: Callable[[ResultFolder, Path], PageImage],
) -> Paper:
    return Paper(
        key=key,
        title=paper_titles().get(key, key),
        headlines=tuple((headline, findings(headline, folders)) for headline in headlines),
        targets=tuple(
            _target(list(members), papers, image) for _, members in groupby(folders, lambda folder: folder.key)
        ),
        counts=count_verdicts(result.verdict for folder in folders for result in folder.claims),
    )


def _target(
    members: Sequence[ResultFolder], papers: Path, image: Callable[[ResultFolder, Path], PageImage]
) -> Target:
    first = members[0]
    titles = [folder.title for folder in members if folder.title]
    try:
        numbers = load_paper_numbers(first.paper, folder=papers).for_item(first.item)
    except FileNotFoundError:  # not every paper has been typed in
        numbers = ()
    return Target(
        name=first.target,
        anchor=first.key.replace("/", "-"),
        title=titles[0] if titles else "",
        numbers=display.paper_table(numbers) if numbers else None,
        sections=tuple(_section(folder, image) for folder in members),
    )


def _section(folder: ResultFolder, image: Callable[[ResultFolder, Path], PageImage]) -> Section:
    figures, problems = [], list(folder.problems)
    for path in folder.figures:
        try:
            figures.append(image(folder, path))
        except (OSError, ValueError, SyntaxError):
            problems.append(f"{folder.label}/{path.name} is damaged: run `{rerun_command(folder.path)}` again.")
    return Section(
        folder=folder,
        figures=tuple(figures),
        table=None if folder.table is None else display.frame_table(folder.table, folder.table_name),
        settings=display.settings_table(folder.record),
        problems=tuple(problems),
    )


# ------------------------------------------------------------------------------------ headlines
@dataclass(frozen=True)
class Headline:
    """One sentence that a reader of a paper remembers, with the claims that test it: an entry of headlines.yaml.

    Args:
        says: the sentence, in our words.
        claims: "<paper>/<item>/<claim>"; a star stands for variants, "lissa/fig1/agreement-*".
    """

    says: str
    claims: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """What one preset found on a headline.

    Args:
        preset: the preset.
        verdicts: how many of the claims have each verdict, in the order of `VERDICTS`; none with 0.
        results: the claims, each with the folder it stands in.
    """

    preset: str
    verdicts: Mapping[str, int]
    results: tuple[tuple[ResultFolder, ClaimResult], ...]


def load_headlines(papers: str | Path) -> dict[str, tuple[Headline, ...]]:
    """Return the headlines by paper; none when there is no such file.

    Raises:
        ValueError: the file cannot be read; says what an entry needs.
    """
    path = Path(papers) / HEADLINES
    if not path.is_file():
        return {}
    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(path))
        return {
            str(paper): tuple(Headline(str(entry["says"]), tuple(map(str, entry["claims"]))) for entry in entries)
            for paper, entries in content.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, YAMLError) as error:
        raise ValueError(
            f"{HEADLINES} is damaged ({type(error).__name__}): each paper needs a list of `says` and `claims`."
        ) from error


def findings(headline: Headline, folders: Sequence[ResultFolder]) -> tuple[Finding, ...]:
    """Return what each preset that has one of the headline's claims found, in the order of `folders`."""
    found: dict[str, list[tuple[ResultFolder, ClaimResult]]] = {}
    for folder in folders:
        for result in folder.claims:
            name = f"{folder.key}/{result.claim.id}"
            if any(fnmatchcase(name, claim) for claim in headline.claims):
                found.setdefault(folder.preset, []).append((folder, result))
    return tuple(
        Finding(preset, count_verdicts(result.verdict for _, result in results), tuple(results))
        for preset, results in found.items()
    )


def count_verdicts(verdicts: Iterable[str]) -> dict[str, int]:
    """Return how often each verdict occurs, in their fixed order; none with 0."""
    counts = Counter(verdicts)
    return {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]}


# ------------------------------------------------------------------------------------ scoreboard
def scoreboard(folders: Sequence[ResultFolder]) -> pd.DataFrame:
    """Return one row per claim of each folder; measure, source and explanation stand in its claims.json."""
    rows = []
    for folder in folders:
        for result in folder.claims:
            claim, interval = result.claim, result.interval
            rows.append(
                {
                    "target": folder.target,
                    "preset": folder.preset,
                    "claim": claim.id,
                    "statement": claim.statement,
                    "paper_value": claim.paper_value,
                    "value": result.value,
                    "low": interval.low if interval else None,
                    "high": interval.high if interval else None,
                    "interval": interval.kind if interval else None,
                    "criterion": str(claim.criterion),
                    "verdict": result.verdict,
                    "units": folder.commits["computed"],
                }
            )
    return pd.DataFrame(rows, columns=None if rows else ["verdict"])


def verdict_counts(board: pd.DataFrame) -> dict[str, int]:
    """Return how many rows have each verdict; all verdicts are there, in their fixed order."""
    return {verdict: int((board["verdict"] == verdict).sum()) for verdict in VERDICTS}


def write_scoreboard(board: pd.DataFrame, results: str | Path) -> Path:
    """Write `results`/scoreboard.csv, floats to six digits, and return its path."""
    path = Path(results) / "scoreboard.csv"
    write_atomically(path, board.to_csv(index=False, float_format="%.6g", lineterminator="\n").encode())
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the report; prints where it is, and every damaged file to stderr."""
    parser = argparse.ArgumentParser(
        description="write results/index.html, a page for each paper, and results/scoreboard.csv"
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the results")
    parser.add_argument("--papers", type=Path, default=PAPERS, help="folder of the papers' numbers")
    parser.add_argument(
        "--single-file", type=Path, metavar="FILE", help="write one page here, with the figures inside"
    )
    options = parser.parse_args(arguments)
    try:
        report = build_report(options.results, papers=options.papers, single_file=options.single_file)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    for problem in report.problems:
        print(f"warning: {problem}", file=sys.stderr)
    page = report.page if options.single_file else options.results / report.page.name
    size = sum(path.stat().st_size for path in (report.page, *report.pages))
    beside = f", with {len(report.pages)} of papers" if report.pages else ""
    print(f"{page.as_posix()} ({size / 2**20:.1f} MiB{beside})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
