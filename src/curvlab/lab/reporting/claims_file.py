"""claims.json: the claims of one result folder, written at once and checked when read."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from curvlab.files import write_atomically
from curvlab.lab.reporting.claims import (
    OUT_OF_REACH,
    REPRODUCED,
    Change,
    Claim,
    ClaimResult,
    Criterion,
    decide,
    describe,
)
from curvlab.lab.reporting.intervals import Interval

FILE_NAME = "claims.json"
SCHEMA_VERSION = 2
_FORMER_VERSION = 1  # had no "undecided" and no "refuted": its verdicts are decided again


def save_claims(folder: str | Path, results: Sequence[ClaimResult]) -> Path:
    """Write `folder`/claims.json in one step: a reader sees the old file or the new one, never a part."""
    repeated = [name for name, count in Counter(result.claim.id for result in results).items() if count > 1]
    if repeated:
        raise ValueError(f"claim ids must be unique within a target, repeated: {', '.join(repeated)}.")
    content = {"schema_version": SCHEMA_VERSION, "claims": [plain_result(result) for result in results]}
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    path = Path(folder) / FILE_NAME
    write_atomically(path, text.encode())
    return path


def load_claims(folder: str | Path) -> list[ClaimResult]:
    """Read `folder`/claims.json; every verdict is checked against its value, interval and criterion.

    A file of schema version 1 keeps its values, intervals and reasons; its verdicts are decided again.

    Raises:
        ValueError: the file is missing or damaged; names it and the command that writes it anew.
    """
    path = Path(folder) / FILE_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["schema_version"]
        if version not in (_FORMER_VERSION, SCHEMA_VERSION):
            raise ValueError(f"schema version {version!r}, expected {SCHEMA_VERSION}")
        return [_result_from_json(entry, again=version == _FORMER_VERSION) for entry in content["claims"]]
    except FileNotFoundError:
        raise ValueError(f"{path.as_posix()} is missing: run `{rerun_command(folder)}` again.") from None
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
    return plain


def _to_json(value: Any) -> Any:
    """Return `value` with nan and infinities as text, since JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: _to_json(entry) for key, entry in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _result_from_json(entry: dict[str, Any], *, again: bool) -> ClaimResult:
    """Return one claim; `again` decides its verdict anew, unless the preset called it out of reach."""
    claim, interval, value = entry["claim"], entry["interval"], entry["value"]
    criterion = _criterion_from_json(claim["criterion"])
    value = None if value is None else float(value)
    changed = tuple(Change(**change) for change in claim.get("changed", ()))
    if interval is not None:
        interval = Interval(
            low=float(interval["low"]),
            high=float(interval["high"]),
            kind=interval["kind"],
            num_samples=int(interval["num_samples"]),
        )
    verdict, explanation = entry["verdict"], entry["explanation"]
    if again and verdict != OUT_OF_REACH:
        verdict = decide(value, interval, criterion)
        if verdict != REPRODUCED and not explanation:
            explanation = describe(value, interval, criterion)
    return ClaimResult(
        claim=Claim(**{**claim, "criterion": criterion, "changed": changed}),
        value=value,
        interval=interval,
        verdict=verdict,
        explanation=explanation,
    )


def _criterion_from_json(entry: dict[str, Any]) -> Criterion:
    bounds = {name: None if bound is None else float(bound) for name, bound in entry.items() if name != "exact"}
    return Criterion(**bounds, exact=bool(entry.get("exact", False)))
