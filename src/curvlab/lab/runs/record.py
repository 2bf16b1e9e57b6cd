"""run.json: how it is read, and how judging and drawing sign it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from curvlab.files import write_atomically
from curvlab.lab.runs.provenance import Commit

RECORD = "run.json"
NOT_RECORDED = (
    "commits not recorded"  # instead of the list of units, in results from before units kept their origin
)


def read_record(folder: Path) -> dict[str, Any]:
    """Return the content of `folder`/run.json.

    Raises:
        ValueError: it is missing or damaged; says which run writes it anew.
    """
    path = folder / RECORD
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path.as_posix()} is missing: its run was stopped, or never made; run the target again."
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.as_posix()} is damaged ({error}): run the target again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.as_posix()} is damaged (it holds no keys): run the target again.")
    return content


def sign(folder: Path, act: str, commit: Commit) -> None:
    """Note in run.json which commit did something with the tables: `act` is "judged" or "drawn"."""
    record = read_record(folder)
    record[act] = {"commit": commit.commit, "clean": commit.clean}
    write_atomically(folder / RECORD, (json.dumps(record, indent=2) + "\n").encode())


def recorded_units(folder: Path) -> int | None:
    """Return how many units of work the folder's last run asked for; None when that cannot be known.

    Of a variation that never ran, the preset's own folder is taken.
    """
    for candidate in (folder, folder.with_name(folder.name.partition("+")[0])):
        try:
            return int(read_record(candidate)["num_units"])
        except (ValueError, KeyError, TypeError):
            continue
    return None
