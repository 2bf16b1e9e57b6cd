"""claims.yaml: what a paper says and when it counts as reproduced, in a file that needs no Python to be read.

source: Saghir et al. 2024, Sec. 3.3, Fig. 6     # of every claim that names no other
claims:
  llc-does-not-increase:
    statement: The LLC of SGD does not increase although its learning rate is raised ({of}).
    source: Saghir et al. 2024, Fig. 6 (b)        # optional
    paper_value: does not increase, no number     # or a number; null: the paper states neither
    measure: slope of the LLC after the split over its value there; mean over seeds
    criterion: {at_most: 0.1}                     # see Criterion
    changed:                                      # after results were seen
      - {date: 2026-11-20, what: over the seeds' mean instead of each seed's own}
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from curvlab.lab.reporting.claims import Change, Claim, ClaimResult, Criterion

_REQUIRED = {"statement", "paper_value", "measure", "criterion"}
_OPTIONAL = {"source", "changed"}


@dataclass(frozen=True)
class ClaimSheet:
    """The claims of one target, as its claims.yaml states them.

    Args:
        path: the file.
        source: where a claim stands that does not say so itself.
        entries: the claims by id.
    """

    path: Path
    source: str
    entries: Mapping[str, Mapping[str, Any]]

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
        entry = _filled(self.entries[name], words | {"of": of}, f"{self.path.as_posix()}, claim {name!r}")
        try:
            criterion = Criterion(**{bound: _bound(value) for bound, value in entry["criterion"].items()})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.path.as_posix()}, claim {name!r}: {error}") from None
        return Claim(
            id=f"{name}-{of}" if of else name,
            statement=entry["statement"],
            source=entry.get("source") or self.source,
            paper_value=entry["paper_value"],
            measure=entry["measure"],
            criterion=criterion,
            changed=tuple(Change(str(change["date"]), change["what"]) for change in entry.get("changed") or ()),
        )

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
    except (yaml.YAMLError, TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{path.as_posix()} needs `source` and `claims`: {error}") from error
    for name, entry in entries.items():
        keys = set(entry) if isinstance(entry, dict) else set()
        if missing := sorted(_REQUIRED - keys):
            raise ValueError(f"{path.as_posix()}, claim {name!r} lacks {', '.join(missing)}.")
        if unknown := sorted(keys - _REQUIRED - _OPTIONAL):
            raise ValueError(
                f"{path.as_posix()}, claim {name!r} has unknown keys: {', '.join(unknown)}; known are "
                f"{', '.join(sorted(_REQUIRED | _OPTIONAL))}, and in `criterion` "
                f"{', '.join(bound.name for bound in fields(Criterion))}."
            )
    return ClaimSheet(path, source, entries)


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML would silently take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        if repeated := {key for key in keys if keys.count(key) > 1}:
            raise ValueError(f"{', '.join(map(str, repeated))} stands twice")
        found: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return found


def _filled(value: Any, words: Mapping[str, Any], where: str) -> Any:
    if isinstance(value, str):
        names = {field for _, field, _, _ in string.Formatter().parse(value) if field}
        if unknown := sorted(names - set(words)):
            raise ValueError(f"{where}: nothing fills {', '.join(f'{{{name}}}' for name in unknown)}.")
        return value.format(**words) if names else value
    if isinstance(value, Mapping):
        return {key: _filled(entry, words, where) for key, entry in value.items()}
    if isinstance(value, list):
        return [_filled(entry, words, where) for entry in value]
    return value


def _bound(value: Any) -> Any:
    return float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else value
