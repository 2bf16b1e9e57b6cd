"""The results page: `python -m curvlab.reporting.report` writes results/index.html and scoreboard.csv.

The page is one file without any reference to another: figures are embedded, the script only filters the
scoreboard. It depends on nothing but the result folders, so that the same results give the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from curvlab.reporting import display
from curvlab.reporting.claims import VERDICTS
from curvlab.reporting.claims_file import rerun_command
from curvlab.reporting.display import DisplayTable
from curvlab.reporting.embedding import EmbeddedImage, embed_image
from curvlab.reporting.paper_numbers import load_paper_numbers
from curvlab.reporting.result_folder import ResultFolder, read_results
from curvlab.reporting.scoreboard import scoreboard, verdict_counts, write_scoreboard

TITLES = {
    "lissa": "Klochkov & Liu 2024: LiSSA and inverse Hessian-vector products",
    "pbrf": "Bae et al. 2022: what influence functions answer",
    "ginger": "Ginger: curvature approximation with linear complexity",
    "ngd": "Saghir et al. 2024: NGD and the local learning coefficient",
    "rank1": "Semenov 2025: rank-one approximation of the Hessian",
}


@dataclass(frozen=True)
class Section:
    """One target at one preset, ready to be shown."""

    folder: ResultFolder
    figures: tuple[EmbeddedImage, ...]
    table: DisplayTable | None
    scale: DisplayTable | None
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """What was written, and a sentence for every file that is missing or damaged."""

    page: Path
    scoreboard: Path
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Target:
    """A target with the paper's own numbers and its presets."""

    name: str
    paper: str
    title: str
    numbers: DisplayTable | None
    sections: tuple[Section, ...]


def build_report(results: str | Path, *, papers: str | Path | None = None) -> Report:
    """Write scoreboard.csv and index.html into `results`; damaged files are named, not fatal.

    Args:
        results: the folder with <paper>/<item>/<preset>/.
        papers: the folder with the papers' numbers; by default experiments/papers of the source tree.
    """
    folders = read_results(results)
    board = scoreboard(folders)
    targets = [
        _target(name, list(members), papers) for name, members in groupby(folders, lambda folder: folder.target)
    ]
    environment = Environment(
        loader=PackageLoader("curvlab.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(display=display, verdicts=VERDICTS, titles=TITLES)
    problems = tuple(problem for target in targets for section in target.sections for problem in section.problems)
    html = environment.get_template("report.html").render(
        targets=targets,
        counts=verdict_counts(board),
        presets=list(dict.fromkeys(folder.preset for folder in folders)),
        papers=list(dict.fromkeys(folder.paper for folder in folders)),
        problems=problems,
    )
    page = Path(results) / "index.html"
    page.write_text(html, encoding="utf-8")
    return Report(page, write_scoreboard(board, results), problems)


def _target(name: str, members: Sequence[ResultFolder], papers: str | Path | None) -> Target:
    first = members[0]
    titles = [str(folder.run["title"]) for folder in members if folder.run.get("title")]
    try:
        numbers = load_paper_numbers(first.paper, folder=papers).for_item(first.item)
    except FileNotFoundError:  # not every paper has been typed in, and a wheel carries none
        numbers = ()
    return Target(
        name=name,
        paper=first.paper,
        title=titles[0] if titles else "",
        numbers=display.paper_table(numbers) if numbers else None,
        sections=tuple(_section(folder) for folder in members),
    )


def _section(folder: ResultFolder) -> Section:
    figures, problems = [], list(folder.problems)
    for path in folder.figures:
        try:
            figures.append(embed_image(path))
        except (OSError, ValueError, SyntaxError):  # Pillow raises all three on damaged files
            problems.append(f"{folder.label}/{path.name} is damaged: run `{rerun_command(folder.path)}` again.")
    return Section(
        folder=folder,
        figures=tuple(figures),
        table=None if folder.table is None else display.frame_table(folder.table, folder.table_name),
        scale=display.scale_table(folder.run.get("scale")),
        problems=tuple(problems),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the report; prints where it is, and every damaged file to stderr."""
    parser = argparse.ArgumentParser(description="write results/index.html and results/scoreboard.csv")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the results")
    options = parser.parse_args(arguments)
    try:
        report = build_report(options.results)
    except FileNotFoundError as error:
        parser.error(str(error))
    for problem in report.problems:
        print(f"warning: {problem}", file=sys.stderr)
    print(f"{report.page.as_posix()} ({report.page.stat().st_size / 2**20:.1f} MiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
