"""The claims of a target (<item>.yaml): what a paper says, and when it counts as reproduced.

source: Saghir et al. 2024, Sec. 3.3, Fig. 6     # of every claim that names no other
not_asked:                                       # optional: what a preset cannot decide, as known beforehand
  laptop: {"*-resnet8": Its loss is 3 after the epochs of this preset; the paper's regime is 1e-5.}
claims:
  llc-does-not-increase:
    statement: The LLC of SGD does not increase although its learning rate is raised ({of}).
    source: Saghir et al. 2024, Fig. 6 (b)        # optional
    paper_value: does not increase, no number     # or a number; null: the paper states neither. Optional where the
                                                  # source begins with "ours" or "curvlab": no paper's claim
    measure: slope of the LLC after the split over its value there; mean over seeds
    criterion: {at_most: 0.1}                     # see Criterion
    changed:                                      # after results were seen: the day, and what was changed
      - 2026-11-20: over the seeds' mean instead of each seed's own
    value: {mean: slope / level, over: seed, by: task}   # optional: then `judge` need not know the claim
    why: The learning rate is not high enough.    # with `value`: what explains a failure
    shown: Seconds of one machine.                # optional: why what is measured is shown and never judged

`value` is one statistic of one table; `judge` is for what it cannot say.

    mean: EXPRESSION        over: seed        mean over repetitions, each the mean of its rows; t interval
    largest: EXPRESSION                       of all rows, exact; or low: COLUMN and high: COLUMN of its row, 95 %,
                                              samples: COLUMN where they are a bootstrap's, of so many {unit}
    smallest: EXPRESSION                      likewise

    table: summary          the table, `table` unless named
    where: optimizer == 'ngd' and step > 0    the rows that count, as in DataFrame.query
    by: task                one claim for each value, whose name is {of}; or a list of columns
    unit: points            what is repeated, for the text; the name of `over`, or "rows", unless given
    otherwise: TEXT         why the claim is out of reach for a group none of whose rows counts; else it has none

`not_asked` names claims by their ids, a star stands for anything. Those of them that come out out of reach are not
asked for the reason given; what a run judges stands all the same. "*" alone is for a target of which the preset
decides nothing: where it decides a claim, the others have reasons of their own, and are to be named.

An EXPRESSION is of columns, as in DataFrame.eval: `last / first`, "`found at 20 %` - loss", sqrt(a). nan stays
nan, and undecides: say in `where` which rows may be missing.
"""

from __future__ import annotations

import json
import math
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from curvlab.files import write_atomically
from curvlab.lab.claims.claim_values import check, measure
from curvlab.lab.claims.claims import (
    NOT_ASKED,
    UNDECIDED,
    UNJUDGED,
    Change,
    Claim,
    ClaimResult,
    Criterion,
    describe,
    is_ours,
    judge,
    not_asked,
    out_of_reach,
)
from curvlab.lab.claims.intervals import Interval
from curvlab.lab.targets.target import ROOT

FILE_NAME = "claims.json"
SCHEMA_VERSION = 3

_REQUIRED = {"statement", "measure", "criterion"}
_OPTIONAL = {"source", "paper_value", "changed", "value", "why", "shown"}


@dataclass(frozen=True)
class ClaimSheet:
    """The claims of one target, as its claims.yaml states them.

    Args:
        path: the file.
        source: where a claim stands that does not say so itself.
        entries: the claims by id.
        left_out: reasons by pattern of claims, by preset, that it cannot decide.
    """

    path: Path
    source: str
    entries: Mapping[str, Mapping[str, Any]]
    left_out: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def claim(self, name: str, of: str = "", **words: Any) -> Claim:
        """Return a claim.

        Args:
            name: its id in the file.
            of: what it is judged of, where there are several: a task, say. Becomes part of the id, and `{of}`.
            words: for other `{word}`s in its texts and bounds.

        Raises:
            KeyError: there is no such claim; lists those that there are.
        """
        if name not in self.entries:
            raise KeyError(f"{self.path.as_posix()} has no claim {name!r}; it has: {', '.join(self.entries)}.")
        words |= {"of": of} if of else {}
        entry = _filled(self.entries[name], words, f"{self.path.as_posix()}, claim {name!r}")
        try:
            criterion = Criterion(**{bound: _bound(value) for bound, value in entry["criterion"].items()})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.path.as_posix()}, claim {name!r}: {error}") from None
        return Claim(
            id=f"{name}-{of}" if of else name,
            statement=entry["statement"],
            source=entry.get("source") or self.source,
            paper_value=entry.get("paper_value"),
            measure=entry["measure"],
            criterion=criterion,
            changed=tuple(
                Change(str(day), what) for change in entry.get("changed") or () for day, what in change.items()
            ),
            words=words,
        )

    def unjudged(self, name: str, reason: str, of: str = "", **words: Any) -> ClaimResult:
        """Return a claim out of reach for a reason; each `{word}` of its texts that is not given is "all"."""
        words = dict.fromkeys(_words_in(self.entries.get(name)), "all") | ({"of": of} if of else {}) | words
        return out_of_reach(self.claim(name, **words), reason)

    def judge_values(self, tables: Mapping[str, pd.DataFrame]) -> list[ClaimResult]:
        """Return the verdicts of all claims that say their `value` of these tables, in the order of the file."""
        results = []
        for name, entry in self.entries.items():
            if "value" not in entry:
                continue
            try:
                for found in measure(entry["value"], tables):
                    if found.value is None:
                        results.append(self.unjudged(name, found.fact, found.of))
                    else:
                        claim = self.claim(name, of=found.of)
                        why = f"{found.fact} {entry.get('why', '')}".strip() or f"It is the {claim.measure}."
                        results.append(judge(claim, found.value, found.interval, if_not_reproduced=why))
            except (ValueError, KeyError) as error:
                raise ValueError(f"{self.path.as_posix()}, claim {name!r}: {error}") from error
        return results

    def in_order(self, results: Iterable[ClaimResult]) -> list[ClaimResult]:
        """Return results in the order of the file, those of one entry as they are."""
        places = list(self.entries)
        return sorted(results, key=lambda result: places.index(self._entry_of(result.claim.id) or places[-1]))

    def asked(self, results: Iterable[ClaimResult], preset: str) -> list[ClaimResult]:
        """Return results; those `shown`, and those out of reach that the preset does not ask, with the reason.

        Raises:
            ValueError: the sheet says "*" of a preset that decides one of its claims.
        """
        reasons, found, results = self.left_out.get(preset, {}), [], [self._shown(result) for result in results]
        decided = [result.claim.id for result in results if result.verdict not in (*UNJUDGED, UNDECIDED)]
        if "*" in reasons and decided:
            raise ValueError(
                f'{self.path.as_posix()} asks nothing of {preset} ("*"), which decides {", ".join(decided[:3])}: '
                "name the claims that it cannot decide, each with its reason."
            )
        for result in results:
            fitting = (reason for pattern, reason in reasons.items() if fnmatchcase(result.claim.id, pattern))
            reason = next(fitting, None)
            found.append(result if reason is None else not_asked(result, reason))
        return found

    def _shown(self, result: ClaimResult) -> ClaimResult:
        """Return a result as not asked where its entry says why it is `shown`."""
        entry = self.entries.get(self._entry_of(result.claim.id) or "", {})
        if "shown" not in entry or result.value is None:
            return result
        measured = result.explanation or describe(result.value, result.interval, result.claim.criterion)
        return replace(result, verdict=NOT_ASKED, explanation=f"{entry['shown']} {measured}")

    def check_all_judged(self, results: Iterable[ClaimResult]) -> None:
        """Raise a ValueError when a claim of the file was not judged: out_of_reach says why one cannot be."""
        judged = {self._entry_of(result.claim.id) for result in results}
        left = [name for name in self.entries if name not in judged]
        if left:
            raise ValueError(
                f"{self.path.as_posix()} states {', '.join(left)}, and no run judged it: judge it, or give the "
                "reason with out_of_reach."
            )

    def _entry_of(self, claim_id: str) -> str | None:
        """Return the entry that an id comes from: of "falls" and "falls-not", "falls-not-mlp" is of the second."""
        fitting = [name for name in self.entries if claim_id == name or claim_id.startswith(f"{name}-")]
        return max(fitting, key=len, default=None)


def load_claim_sheet(path: str | Path) -> ClaimSheet:
    """Read a claims.yaml; a ValueError names the claim and the key that is wrong."""
    path = Path(path)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)  # a SafeLoader
        source, entries = str(content["source"]), dict(content["claims"])
        left_out = {preset: dict(reasons) for preset, reasons in (content.get("not_asked") or {}).items()}
    except (yaml.YAMLError, TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{path.as_posix()} needs `source` and `claims`: {error}") from error
    for name, entry in entries.items():
        keys = set(entry) if isinstance(entry, dict) else set()
        ours = isinstance(entry, dict) and is_ours(str(entry.get("source") or source))
        if missing := sorted((_REQUIRED if ours else _REQUIRED | {"paper_value"}) - keys):
            raise ValueError(f"{path.as_posix()}, claim {name!r} lacks {', '.join(missing)}.")
        if unknown := sorted(keys - _REQUIRED - _OPTIONAL):
            raise ValueError(
                f"{path.as_posix()}, claim {name!r} has unknown keys: {', '.join(unknown)}; known are "
                f"{', '.join(sorted(_REQUIRED | _OPTIONAL))}, and in `criterion` "
                f"{', '.join(bound.name for bound in fields(Criterion))}."
            )
        for change in entry.get("changed") or ():
            if not (isinstance(change, dict) and [type(day) for day in change] == [date]):
                raise ValueError(
                    f"{path.as_posix()}, claim {name!r}: a change is its day and what was changed, as in "
                    f"`- 2026-11-20: over the mean`, not {change}."
                )
        if "value" in entry:
            try:
                check(entry["value"])
            except ValueError as error:
                raise ValueError(f"{path.as_posix()}, claim {name!r}: {error}") from None
    return ClaimSheet(path, source, entries, left_out)


class _UniqueKeys(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # in C, 10 times as fast
    """Refuses a key that stands twice, of which YAML would silently take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        # `<<: *other` stands for the keys of another claim, which may be given anew.
        named = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        keys = [self.construct_object(key, deep=deep) for key in named]
        if repeated := {key for key in keys if keys.count(key) > 1}:
            raise ValueError(f"{', '.join(map(str, repeated))} stands twice")
        found: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return found


def _filled(value: Any, words: Mapping[str, Any], where: str) -> Any:
    if isinstance(value, str):
        names = _words_in(value)
        if unknown := sorted(names - set(words)):
            raise ValueError(f"{where}: nothing fills {', '.join(f'{{{name}}}' for name in unknown)}.")
        return value.format(**words) if names else value
    if isinstance(value, Mapping):
        return {key: _filled(entry, words, where) for key, entry in value.items()}
    if isinstance(value, list):
        return [_filled(entry, words, where) for entry in value]
    return value


def _words_in(value: Any) -> set[str]:
    """Return the names of the `{word}`s in the texts of an entry, or of a part of one."""
    if isinstance(value, str):
        return {field for _, field, _, _ in string.Formatter().parse(value) if field}
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return {name for part in parts for name in _words_in(part)}


def _bound(value: Any) -> Any:
    return float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else value


# ------------------------------------------------------------------------------------ claims.json
def save_claims(folder: str | Path, results: Sequence[ClaimResult], sheet: Path | None = None) -> Path:
    """Write `folder`/claims.json in one step: a reader sees the old file or the new one, never a part.

    Args:
        folder: of the result.
        results: of all its claims.
        sheet: the file that states them: then only their ids and words are written, and `load_claims` reads the
            rest there.
    """
    repeated = [name for name, count in Counter(result.claim.id for result in results).items() if count > 1]
    if repeated:
        raise ValueError(f"claim ids must be unique within a target, repeated: {', '.join(repeated)}.")
    plain = [plain_result(result) for result in results]
    content: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
    if sheet is not None:
        content["sheet"] = sheet.relative_to(ROOT).as_posix()
        for entry, result in zip(plain, results, strict=True):
            named = {"id": result.claim.id, "words": _to_json(dict(result.claim.words))}
            try:
                as_stated = _stated(named, _sheet(sheet)) == result.claim
            except (KeyError, ValueError):
                as_stated = False
            if as_stated:  # or else it is written in full
                entry["claim"] = named
    text = json.dumps(content | {"claims": plain}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    path = Path(folder) / FILE_NAME
    write_atomically(path, text.encode())
    return path


def load_claims(folder: str | Path) -> list[ClaimResult]:
    """Read `folder`/claims.json; every verdict is checked against its value, interval and criterion.

    Raises:
        ValueError: the file is missing or damaged; names it and the command that writes it anew.
    """
    path = Path(folder) / FILE_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema version {content['schema_version']!r}, expected {SCHEMA_VERSION}")
        sheet = _sheet(_place(path, content["sheet"])) if "sheet" in content else None
        return [_result(entry, sheet) for entry in content["claims"]]
    except FileNotFoundError as error:
        missing = path.as_posix() if error.filename in (None, str(path)) else f"{error.filename}, its claims,"
        raise ValueError(f"{missing} is missing: run `{rerun_command(folder)}` again.") from None
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise ValueError(
            f"{path.as_posix()} is damaged ({type(error).__name__}: {error}): run `{rerun_command(folder)}` again."
        ) from error


def rerun_command(folder: str | Path) -> str:
    """Return the make line that fills the result folder .../<paper>/<item>/<preset>."""
    paper, item, preset = Path(folder).resolve().parts[-3:]
    return f"make {paper}-{item} PRESET={preset}"


def plain_result(result: ClaimResult) -> dict[str, Any]:
    """Return one claim as claims.json has it."""
    plain: dict[str, Any] = _to_json(asdict(result))
    del plain["claim"]["words"]
    if result.interval is not None and result.interval.forecast is None:
        del plain["interval"]["forecast"]
    return plain


def _to_json(value: Any) -> Any:
    """Return `value` with nan and infinities as text, since JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: _to_json(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [_to_json(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _place(path: Path, sheet: str) -> Path:
    """Return the sheet that claims.json names, of the checkout where it lies, else of this one."""
    return next((place / sheet for place in path.resolve().parents if (place / sheet).is_file()), ROOT / sheet)


def _sheet(path: Path) -> ClaimSheet:
    return _read_sheet(path, path.stat().st_mtime_ns)


@cache
def _read_sheet(path: Path, _: int) -> ClaimSheet:
    return load_claim_sheet(path)


def _stated(claim: Mapping[str, Any], sheet: ClaimSheet | None) -> Claim:
    """Return the claim that claims.json names, as its sheet states it, or states in full."""
    if "statement" not in claim and sheet is not None:
        name = claim["id"].removesuffix(f"-{claim['words'].get('of', '')}")
        return sheet.claim(name, **claim["words"])
    bounds: dict[str, Any] = {
        name: bound if name == "exact" else _number(bound) for name, bound in claim["criterion"].items()
    }
    changed = tuple(Change(**change) for change in claim["changed"])
    return Claim(**{**claim, "criterion": Criterion(**bounds), "changed": changed})


def _result(entry: dict[str, Any], sheet: ClaimSheet | None) -> ClaimResult:
    claim, interval, value = _stated(entry["claim"], sheet), entry["interval"], entry["value"]
    if interval is not None:
        forecast = interval.get("forecast")
        ends: dict[str, Any] = {end: _number(interval[end]) for end in ("low", "high")}
        ends["forecast"] = None if forecast is None else (float(forecast[0]), float(forecast[1]))
        interval = Interval(**interval | ends)
    return ClaimResult(claim, _number(value), interval, entry["verdict"], entry["explanation"])


def _number(value: float | str | None) -> float | None:
    """Return a number, nan and infinities from their text."""
    return None if value is None else float(value)
