"""What run.json says about how a result was made, read so that damage is named, not fatal.

The keys read here (any may be missing; the rest of the file is shown by `display.run_facts`):

    units       [{"name", "commit", "clean", "count", ...}, ...]: the units of work and the commit that computed
                each, or the words "commits not recorded"
    assembled, judged, drawn    {"commit", "clean"}: the code that put the tables together, judged the claims and
                drew the figures
    settings    [{"name", "ours", "paper"}, ...]: our settings beside the paper's
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOT_RECORDED = "not recorded"
UNITS_NOT_RECORDED = "commits not recorded"
STEPS = ("assembled", "judged", "drawn")
_SHORT = 8  # characters of a commit, enough for git to find it


@dataclass(frozen=True)
class Setting:
    """One setting of ours beside the paper's; None where run.json states neither."""

    name: str
    ours: Any
    paper: Any


@dataclass(frozen=True)
class RunRecord:
    """The content of run.json.

    Args:
        content: the whole file; empty when it is damaged.
        units: how many units each commit computed, in words: "41 units from 3f2a1b9c, 3 from a0b1c2d3 with
            changes", or `UNITS_NOT_RECORDED`.
        steps: "judged" etc. with the commit in words, or `NOT_RECORDED`.
        settings: ours beside the paper's.
        problems: what is damaged, e.g. "units[3] has no count".
    """

    content: Mapping[str, Any]
    units: str
    steps: Mapping[str, str]
    settings: tuple[Setting, ...]
    problems: tuple[str, ...]

    def text(self, key: str) -> str:
        """Return a key whose value is text; "" when it is missing or no text."""
        value = self.content.get(key)
        return value if isinstance(value, str) else ""


def read_record(path: Path) -> RunRecord:
    """Read run.json.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no JSON object.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no keys")
    return parse_record(content)


def parse_record(content: Mapping[str, Any]) -> RunRecord:
    """Return the record that run.json's content makes; what cannot be understood becomes a problem."""
    problems: list[str] = []
    units = _units(content.get("units"), problems)
    steps = {step: _step(step, content.get(step), problems) for step in STEPS}
    settings = tuple(_settings(content.get("settings"), problems))
    for key in ("target", "title", "command", "python_command"):
        if not isinstance(content.get(key, ""), str):
            problems.append(f"{key} is no text")
    return RunRecord(content, units, steps, settings, tuple(problems))


def commit_text(commit: str, clean: bool | None) -> str:
    """Return "3f2a1b9c", "3f2a1b9c with changes", or "3f2a1b9c, changes unknown"."""
    remark = {True: "", False: " with changes", None: ", changes unknown"}[clean]
    return f"{commit[:_SHORT]}{remark}"


def _units(entries: Any, problems: list[str]) -> str:
    if entries is None or isinstance(entries, str):
        return entries or UNITS_NOT_RECORDED
    if not isinstance(entries, list):
        problems.append("units is neither a list nor text")
        return UNITS_NOT_RECORDED
    counts: Counter[str] = Counter()
    for position, entry in enumerate(entries):
        commit = _commit(f"units[{position}]", entry, problems)
        count = entry.get("count") if isinstance(entry, dict) else None
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            problems.append(f"units[{position}] has no count")
            count = 0
        counts[commit] += count
    if not counts:
        return "no units of work"
    order = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    sources = [f"{count} unit{'' if count == 1 else 's'} from {commit}" for commit, count in order[:1]]
    return ", ".join(sources + [f"{count} from {commit}" for commit, count in order[1:]])


def _step(step: str, entry: Any, problems: list[str]) -> str:
    if entry is None:
        return NOT_RECORDED
    return _commit(step, entry, problems)


def _commit(where: str, entry: Any, problems: list[str]) -> str:
    commit = entry.get("commit") if isinstance(entry, dict) else None
    if not isinstance(commit, str) or not commit:
        problems.append(f"{where} has no commit")
        return "an unknown commit"
    if commit == "unknown":  # what runs write without git
        return "an unknown commit"
    clean = entry.get("clean")
    return commit_text(commit, clean if isinstance(clean, bool) else None)


def _settings(entries: Any, problems: list[str]) -> Iterator[Setting]:
    if entries is None:
        return
    if not isinstance(entries, list):
        problems.append("settings is no list")
        return
    for position, entry in enumerate(entries):
        if isinstance(entry, dict) and isinstance(entry.get("name"), str):
            yield Setting(entry["name"], entry.get("ours"), entry.get("paper"))
        else:
            problems.append(f"settings[{position}] has no name")
