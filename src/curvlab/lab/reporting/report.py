"""The pages of results, in Markdown: `make report` writes them below results/, where the repository shows them.

README.md       five papers: the verdicts on their claims, and every headline with what was found
<paper>/README.md    the parts of a reproducibility report; every target's picture, claims, settings
MISPRINTS.md    what is false as printed, with the counter-examples
REPRODUCE.md    the command, device, time and memory of every result
findings.png    all headlines in one picture
../README.md    the tables between its marks

A target is shown at its largest preset that was judged, and presets are never added up. A claim is the paper's own
when its `source` begins with the paper's name; the others are ours. Nothing but the result folders and
experiments/papers/headlines.yaml goes into the pages: the same results give the same bytes.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from curvlab.files import write_atomically
from curvlab.lab.claims.claims import (
    DIRECTION_ONLY,
    NOT_ASKED,
    NOT_REPRODUCED,
    OUT_OF_REACH,
    REFUTED,
    REPRODUCED,
    UNDECIDED,
    ClaimResult,
)
from curvlab.lab.names import for_readers
from curvlab.lab.reporting import causes, plots
from curvlab.lab.reporting.findings import HEADLINES, PaperFindings, find
from curvlab.lab.reporting.forest import forest
from curvlab.lab.reporting.readme import PARTS, board_of, filled_readme, with_words
from curvlab.lab.reporting.results import ResultFolder, count_verdicts, largest_judged, read_results
from curvlab.lab.reporting.words import cell, note, number_text, value_text
from curvlab.lab.tables import markdown
from curvlab.lab.targets.target import ROOT, paper_titles

NOT_JUDGED = "not judged"
STANDINGS = (REPRODUCED, DIRECTION_ONLY, UNDECIDED, NOT_REPRODUCED, causes.FALSE, NOT_JUDGED)  # see docs/words.md
OPEN_AT = "laptop"
OPEN = ("claims", "asked", UNDECIDED, OUT_OF_REACH, "measured without power", "shown", "not measured", "left open")
SETTING = ("name", "ours", "paper")


# ------------------------------------------------------------------------------------ all pages
def pages(folders: Sequence[ResultFolder], told: Mapping[str, PaperFindings]) -> dict[str, str]:
    """Return the text of every page by its path below the results."""
    shown = {paper: list(own) for paper, own in groupby(folders, lambda folder: folder.paper)}
    titles = paper_titles()
    found = {"README.md": _first_page(shown, titles, told), "REPRODUCE.md": _commands(shown, titles)}
    found["MISPRINTS.md"] = _misprints(shown, titles)
    for paper, own in shown.items():
        found[f"{paper}/README.md"] = _paper_page(titles.get(paper, paper), own, told.get(paper), folders)
    told_pages = {name: for_readers([text])(text) for name, text in found.items()}
    for name in ("README.md", *(f"{paper}/README.md" for paper in shown if paper != "benchmarks")):
        told_pages[name] = with_words(told_pages[name], "../" * name.count("/") + "../docs/words.md")
    return told_pages


def _first_page(
    shown: Mapping[str, Sequence[ResultFolder]], titles: Mapping[str, str], told: Mapping[str, PaperFindings]
) -> str:
    papers = [paper for paper in shown if paper != "benchmarks"]
    counted = {paper: causes.standings(paper, largest_judged(shown[paper])) for paper in papers}
    standings = []
    for paper, counts in counted.items():
        counts[NOT_JUDGED] = counts[OUT_OF_REACH] + counts[NOT_ASKED]
        page = f"[{titles.get(paper, paper).partition(':')[0]}]({paper}/README.md)"
        standings.append([page, *(str(counts[standing]) for standing in STANDINGS)])
    rounded = sum(counts[causes.ROUNDING] for counts in counted.values())
    left_out = f" Not counted: {rounded} that rounding alone refutes." if rounded else ""
    lines = [
        "# What five papers claim, and what came out",
        "",
        "Judged by rule, mostly on small networks and data (preset `laptop`, for some `paper`).",
        "[Commands, devices, times](REPRODUCE.md); [misprints and counter-examples](MISPRINTS.md).",
        "",
        "![Each headline's verdict; our value, where the claim holds, the paper's number](findings.png)",
        "",
        *markdown(("the papers' own claims", *STANDINGS), standings, "|---|" + "---:|" * len(STANDINGS)),
        "",
        "[What the verdicts mean](../docs/words.md#verdict); [what is left open](REPRODUCE.md#left-open)."
        f"{left_out}",
        "",
    ]
    for paper in papers:
        lines += [f"## [{titles.get(paper, paper)}]({paper}/README.md)", ""]
        if paper not in told:
            continue
        places = {folder.key: f"{paper}/README.md{_place(folder, paper)}" for folder in shown[paper]}
        rows = []
        for finding in told[paper].findings:
            place = places.get(finding.headline.shown.rpartition("/")[0])
            verdict = f"[{finding.verdict}]({place})" if place else finding.verdict
            rows.append((cell(finding.headline.says), verdict, cell(finding.short)))
        lines += [*markdown(("it says", "verdict", "found"), rows), ""]
        for folder in largest_judged(shown[paper]):
            if folder.key == told[paper].picture and folder.pictures:
                lines += [_picture(folder, f"{paper}/", folder.target), ""]
    if "benchmarks" in shown:
        lines += ["[This library beside its peers](benchmarks/README.md).", ""]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------ a paper
def _paper_page(
    title: str, own: Sequence[ResultFolder], story: PaperFindings | None, folders: Sequence[ResultFolder]
) -> str:
    """Return the six parts of a reproducibility report; a page of our own benchmarks has the targets alone."""
    chosen = largest_judged(own)
    lines = [f"# {title}", "", "[All papers](../README.md) · [commands, devices and times](../REPRODUCE.md)", ""]
    if story is not None:
        lines += ["## Scope", "", story.says, "", "## Method", "", _method(chosen), "", "## Results", ""]
        lines += [f"{story.text} [Headline by headline](#headline-by-headline), after the targets.", ""]
    for folder in chosen:
        others = [other for other in own if other.key == folder.key and other is not folder]
        lines += _target_section(folder, others)
    if story is None:
        return "\n".join([*lines, *_changes(chosen)])
    lines += ["## Headline by headline", "", *_headlines(story, folders), ""]
    lines += [*_why_not(story.paper, chosen), *_changes(chosen)]
    for heading, text in (("easy", story.easy), ("hard", story.hard)):
        lines += [f"## What was {heading}", "", text, ""]
    return "\n".join([*lines, "## What the paper leaves open", "", story.leaves_open, ""])


def _headlines(story: PaperFindings, folders: Sequence[ResultFolder]) -> list[str]:
    places = {folder.key: f"[{folder.target}]({_place(folder, story.paper)})" for folder in folders}
    rows = []
    for finding in story.findings:
        keys = dict.fromkeys(name.rpartition("/")[0] for name in finding.results)
        words = (cell(finding.headline.says), finding.verdict, cell(finding.text))
        rows.append((*words, ", ".join(places[key] for key in keys)))
    return markdown(("The paper says", "here", "we found", "in"), rows)


def _method(chosen: Sequence[ResultFolder]) -> str:
    """Return in a few words what was run, and how many claims had their criterion changed."""
    presets = Counter(folder.preset for folder in chosen)
    runs = ", ".join(f"{count} at preset `{preset}`" for preset, count in presets.items())
    hours = sum(folder.record.get("unit_seconds") or 0 for folder in chosen) / 3600
    claims = [result.claim for folder in chosen for result in folder.claims]
    changed = sum(bool(claim.changed) for claim in claims)
    return (
        f"{len(chosen)} tables and figures, {runs}: {hours:.1f} hours of CPU. {len(claims)} claims, each judged "
        f"by its criterion and interval; of {changed} (†) the criterion or measure was changed after a result was "
        "seen, [why](#changed-criteria). Settings stand beside the paper's under each target."
    )


def _why_not(paper: str, chosen: Sequence[ResultFolder]) -> list[str]:
    """Return how many of the paper's own claims that are not reproduced have each cause of the closed list."""
    counts = Counter(each.kind for each in causes.false_statements(paper, chosen))
    for folder in chosen:
        own = (
            causes.cause(f"{folder.key}/{result.claim.id}", result.verdict)
            for result in causes.own_claims(paper, folder)
        )
        counts.update(why for why in own if why is not None and why not in causes.FALSE_KINDS)
    rows = [(name, meaning, str(counts[name])) for name, meaning in causes.CAUSES.items() if counts[name]]
    table = markdown(("cause", "it means", "claims"), rows, "|---|---|---:|")
    title, where = "## Why claims are not reproduced", "The note of each such claim begins with its cause."
    return [title, "", where, "", *table, ""] if rows else []


def _changes(chosen: Sequence[ResultFolder]) -> list[str]:
    """Return every change of a criterion or measure after results were seen, folded."""
    claims: dict[tuple[str, str, str], list[str]] = {}
    for folder in chosen:
        for claim in (result.claim for result in folder.claims):
            for change in claim.changed:
                claims.setdefault((folder.target, change.date, change.what), []).append(claim.id)
    lines = [
        f"- {target}, {date}, {ids[0] if len(ids) == 1 else f'{len(ids)} claims'}: {cell(what)}"
        for (target, date, what), ids in claims.items()
    ]
    if not lines:
        return []
    summary = f"<details><summary>{len(lines)} changes of a criterion or measure after results were seen; "
    summary += "their numbers are former bounds and settings</summary>"
    return ["## Changed criteria", "", summary, "", *lines, "", "</details>", ""]


def _target_section(folder: ResultFolder, others: Sequence[ResultFolder]) -> list[str]:
    """Return one target: picture, where it comes from, claims, settings."""
    title, place, record = folder.record.get("title"), f"{folder.item}/{folder.preset}", folder.record
    lines = [f"### {folder.target}{f': {title}' if title else ''}", ""]
    lines += [f"**Damaged:** {problem}" for each in (folder, *others) for problem in each.problems]
    if folder.pictures:
        lines += [_picture(folder, "", cell(str(folder.record.get("title") or folder.target))), ""]
    files = [f"[{name}]({place}/{name})" for name in (*folder.tables, *folder.pictures[1:])]
    lines += [
        f"`{folder.command}`, {_cost(record)}; {folder.computed_by}. {', '.join(files)}, "
        f"[claims.json]({place}/claims.json), [run.json]({place}/run.json)."
    ]
    for other in (each for each in others if each.claims):
        tally = ", ".join(f"{count} {verdict}" for verdict, count in count_verdicts(other.claims).items())
        lines.append(f"[{other.preset}]({other.item}/{other.preset}): {tally}.")
    board = [board_of([*others, folder]).shown(), ""] if folder.key == "benchmarks/board" else []
    lines += ["", *board, *_claims_table(folder), *_settings(record)]
    return lines


def _claims_table(folder: ResultFolder) -> list[str]:
    """Return a row for each claim; of a statement on several networks the words stand once, above the others.

    The note of a claim of the paper's own that is not reproduced begins with its cause.
    """
    whys = {
        result.claim.id: f"{why.capitalize()}: " * (result.verdict in (NOT_REPRODUCED, REFUTED))
        for result in (causes.own_claims(folder.paper, folder) if folder.paper != "benchmarks" else ())
        if (why := causes.cause(f"{folder.key}/{result.claim.id}", result.verdict))
    }
    by_statement: dict[str, list[tuple[str, ClaimResult]]] = {}
    for result in folder.claims:
        words, _, of = result.claim.statement.rstrip(".)").rpartition(" (")
        by_statement.setdefault(words or of, []).append((of, result))
    rows = []
    for group in by_statement.values():
        first = number_text(group[0][1].claim.paper_value)
        for place, (of, result) in enumerate(group):
            statement = f"the same: {of}" if place else result.claim.statement
            paper = number_text(result.claim.paper_value)
            paper = "the same" if place and paper and paper == first else paper
            verdict = result.verdict + (" †" if result.claim.changed else "")
            words = whys.get(result.claim.id, "") + note(result)
            rows.append([cell(each) for each in (statement, paper, value_text(result), verdict, words)])
    return [*markdown(("claim", "paper", "ours", "verdict", "note"), rows), ""] if rows else []


def _settings(record: Mapping[str, Any]) -> list[str]:
    """Return our settings beside the paper's, and what was reduced, folded."""
    settings, reduced = record.get("settings") or [], record.get("reduced") or []
    lines = []
    if settings:
        none = {"ours": "none"}  # where it is null
        rows = [
            [cell(_listed(none.get(name, "") if entry.get(name) is None else entry[name])) for name in SETTING]
            for entry in settings
        ]
        lines += [*markdown(("setting", "ours", "paper"), rows), ""]
    sentences = [f"- {cell(entry)}" for entry in ([reduced] if isinstance(reduced, str) else reduced)]
    lines += [*sentences, ""] if sentences else []
    summary = "<details><summary>Settings, ours and the paper's</summary>"
    return [summary, "", *lines, "</details>", ""] if lines else []


# ------------------------------------------------------------------------------------ misprints
def _misprints(shown: Mapping[str, Sequence[ResultFolder]], titles: Mapping[str, str]) -> str:
    """Return what is false as printed, and what holds instead."""
    found = {paper: causes.false_statements(paper, largest_judged(folders)) for paper, folders in shown.items()}
    kinds = Counter(each.kind for own in found.values() for each in own)
    misprints, refuted = kinds[causes.MISPRINT], kinds[causes.WRONG]
    lines = [
        "# Misprints and counter-examples",
        "",
        f"{kinds.total()} statements that are false as they stand in a paper, each with the number that shows it.",
        f"*Misprint* ({misprints}): mended by a sign, a factor or a name it holds, or two printed numbers",
        f"contradict each other. *Refuted* ({refuted}): it does not hold. The last column is the target that",
        "computes the number; *derivation* is a check by arithmetic, computed when this page is written.",
        "",
    ]
    heads = ("in", "as printed", "as it should be", "counter-example", "kind", "by")
    for paper, own in found.items():
        rows = []
        for each in own:
            words = (each.place, each.printed, each.should_be, each.seen, each.kind)
            by = "[derivation](../experiments/papers/derivations.py)"
            if each.folder is not None:
                by = f"[{each.folder.target}]({paper}/README.md{_place(each.folder, paper)})"
            rows.append([*map(cell, words), by])
        if rows:
            lines += [f"## {titles.get(paper, paper)}", "", *markdown(heads, rows), ""]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------ how to make them
def _commands(shown: Mapping[str, Sequence[ResultFolder]], titles: Mapping[str, str]) -> str:
    lines = [
        "# How each result was made",
        "",
        "CPU time is that of all units of work, also of those that targets share. "
        "`make TARGET PRESET=NAME ARGS=plan=true` says beforehand what it would take. "
        f"{_hours(shown)}",
        "",
    ]
    heads = ("command", "device", "CPU min", "MiB", "products", "computed by")
    for paper, folders in shown.items():
        rows = []
        for folder in folders:
            record = folder.record
            cells = [
                f"`{folder.command}`",
                _device(record),
                _per(record.get("unit_seconds"), 60, ".1f"),
                _per(record.get("peak_memory_bytes"), 2**20, ",.0f"),
                _per(record.get("num_matvecs"), 1, ",.0f"),
                folder.computed_by,
            ]
            rows.append([*map(cell, cells)])
        lines += [f"## {titles.get(paper, paper)}", "", *markdown(heads, rows, "|---|---|--:|--:|--:|---|"), ""]
    return "\n".join([*lines, *_left_open(shown, titles)])


def _hours(shown: Mapping[str, Sequence[ResultFolder]]) -> str:
    """Return the hours of all that is published, preset by preset."""
    hours: dict[str, float] = defaultdict(float)
    for paper, folders in shown.items():
        for folder in folders:
            of = "our own benchmarks" if paper == "benchmarks" else f"the papers at `{folder.preset}`"
            hours[of] += folder.record.get("unit_seconds") or 0
    listed = ", ".join(f"{name} {own / 3600:.1f}" for name, own in sorted(hours.items()))
    whole = f"{sum(hours.values()) / 3600:.1f} hours of CPU time"
    return f"In all {whole}, a unit that several targets share counted for each: {listed}."


def _left_open(shown: Mapping[str, Sequence[ResultFolder]], titles: Mapping[str, str]) -> list[str]:
    """Return how many of each paper's own claims one preset leaves open, and why; what it did not ask counts."""
    found, folders = [], [folder for own in shown.values() for folder in own if folder.preset == OPEN_AT]
    for paper in shown:
        claims = [each for folder in folders for each in causes.own_claims(paper, folder)]
        if paper == "benchmarks" or not claims:
            continue
        counts = Counter(each.verdict for each in claims)
        not_asked = [each for each in claims if each.verdict == NOT_ASKED]
        powerless = sum(each.weighed == UNDECIDED for each in not_asked)
        measured = sum(each.value is not None for each in not_asked)
        numbers = [counts[UNDECIDED], counts[OUT_OF_REACH], powerless, measured - powerless]
        numbers.append(len(not_asked) - measured)
        title = titles.get(paper, paper).partition(":")[0]
        found.append((title, [len(claims), len(claims) - len(not_asked), *numbers]))
    if not found:
        return []
    whole = [sum(column) for column in zip(*(numbers for _, numbers in found), strict=True)]
    _, asked, undecided, unreached, powerless, *_ = whole
    parts = (undecided, asked), (unreached, asked), (undecided + powerless, asked + powerless)
    said = [f"{100 * part / max(1, of):.1f} %" for part, of in parts]
    rows = [
        [title, *map(str, own), f"{100 * sum(own[2:]) / own[0]:.0f} %"] for title, own in (*found, ("all", whole))
    ]
    return [
        "## Left open",
        "",
        *markdown((f"the papers' own claims at `{OPEN_AT}`", *OPEN), rows, "|---|" + "---:|" * len(OPEN)),
        "",
        "Claims that were not asked are *measured without power*, *shown* (measured, and for a reason",
        "that its note gives, or of fewer than three seeds, not judged) or *not measured*. Without power",
        "means: undecided, as the spread of the run's own first two seeds had said; a headline counts these",
        f"as undecided. Of all asked {said[0]} are undecided, {said[1]} out of reach; with those without power",
        f"{said[2]} are undecided.",
        "",
    ]


# ------------------------------------------------------------------------------------ words
def _cost(record: Mapping[str, Any]) -> str:
    seconds = record.get("unit_seconds")
    time = f"{seconds:,.0f} s of CPU time" if isinstance(seconds, int | float) else "time not recorded"
    return f"{time} on {_device(record)}" if _device(record) else time


def _device(record: Mapping[str, Any]) -> str:
    """Return the devices that computed units, the one of the longest first, and the threads."""
    seconds, threads = Counter[str](), record.get("num_threads")
    for unit in record.get("units", ()):
        seconds[unit.get("device") or ""] += unit.get("seconds", 0)
    names = " and ".join(name for name, _ in seconds.most_common() if name) or record.get("device") or ""
    return f"{names}{f', {threads} threads' if threads not in (None, 1) else ''}"


def _per(number: Any, unit: float, digits: str) -> str:
    return f"{number / unit:{digits}}" if isinstance(number, int | float) else ""


def _listed(entries: Any) -> str:
    if isinstance(entries, Mapping):
        return ", ".join(f"{name} {number_text(value)}" for name, value in entries.items())
    return ", ".join(map(number_text, entries)) if isinstance(entries, list) else number_text(entries)


def _picture(folder: ResultFolder, base: str, about: str) -> str:
    return f"![{about}]({base}{folder.item}/{folder.preset}/{folder.pictures[0]})"


def _place(folder: ResultFolder, paper: str) -> str:
    """Return the link to a target's section as a paper's page has it: its heading's words, joined by hyphens."""
    heading = f"{folder.target}: {folder.record['title']}" if folder.record.get("title") else folder.target
    anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    return f"{'' if folder.paper == paper else f'../{folder.paper}/README.md'}#{anchor}"


# ------------------------------------------------------------------------------------ on disk
def build_report(results: str | Path, headlines: Path = HEADLINES, readme: Path | None = None) -> list[str]:
    """Write all pages and the picture of all headlines into `results`, and the README's parts.

    Returns:
        A sentence for every damaged file.
    """
    results, folders = Path(results), read_results(results)
    papers = find(folders, headlines)
    for name, text in pages(folders, {paper.paper: paper for paper in papers}).items():
        write_atomically(results / name, text.encode())
    if papers:
        plots.write_png(forest(papers, paper_titles()), results / "findings.png")
    if readme is not None:
        for document in PARTS:
            path = readme.parent / document
            text = filled_readme(path.read_text(encoding="utf-8"), folders, papers, document)
            write_atomically(path, text.encode())
    return [problem for folder in folders for problem in folder.problems]


def main(results: Path = Path("results")) -> int:
    """Build the report; print where it is, and every damaged file to stderr; return the exit status."""
    own = results.resolve() == ROOT / "results"  # of this checkout: its README tells of them, too
    try:
        problems = build_report(results, readme=ROOT / "README.md" if own else None)
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)
    print(f"{(results / 'README.md').as_posix()}, with a page for each paper")
    return 0


if __name__ == "__main__":
    sys.exit(main())
