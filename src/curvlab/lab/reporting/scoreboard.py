"""scoreboard.csv: one row per claim and preset.

Measure, source and explanation of a claim stand once, in the claims.json of its folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from curvlab.files import write_atomically
from curvlab.lab.reporting.claims import VERDICTS
from curvlab.lab.reporting.result_folder import ResultFolder

COLUMNS = (
    "target",
    "preset",
    "claim",
    "statement",
    "paper_value",
    "value",
    "low",
    "high",
    "interval",
    "criterion",
    "verdict",
    "units",
)


def scoreboard(folders: Sequence[ResultFolder]) -> pd.DataFrame:
    """Return the scoreboard, one row per claim of each folder, in the order of `folders`."""
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
                    "units": folder.record.units,
                }
            )
    return pd.DataFrame(rows, columns=list(COLUMNS))


def verdict_counts(board: pd.DataFrame) -> dict[str, int]:
    """Return how many rows have each verdict; all verdicts are there, in their fixed order."""
    return {verdict: int((board["verdict"] == verdict).sum()) for verdict in VERDICTS}


def write_scoreboard(board: pd.DataFrame, results: str | Path) -> Path:
    """Write `results`/scoreboard.csv, floats to six digits, and return its path."""
    path = Path(results) / "scoreboard.csv"
    write_atomically(path, board.to_csv(index=False, float_format="%.6g", lineterminator="\n").encode())
    return path
