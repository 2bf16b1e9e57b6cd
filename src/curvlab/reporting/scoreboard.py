"""scoreboard.csv: one row per claim and preset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from curvlab.reporting.claims import VERDICTS
from curvlab.reporting.result_folder import ResultFolder

COLUMNS = (
    "paper",
    "target",
    "preset",
    "claim",
    "statement",
    "source",
    "paper_value",
    "value",
    "interval_low",
    "interval_high",
    "interval_kind",
    "criterion",
    "verdict",
    "explanation",
    "commit",
    "tree",
)


def scoreboard(folders: Sequence[ResultFolder]) -> pd.DataFrame:
    """Return the scoreboard, one row per claim of each folder, in the order of `folders`."""
    rows = []
    for folder in folders:
        for result in folder.claims:
            claim, interval = result.claim, result.interval
            rows.append(
                {
                    "paper": folder.paper,
                    "target": folder.target,
                    "preset": folder.preset,
                    "claim": claim.id,
                    "statement": claim.statement,
                    "source": claim.source,
                    "paper_value": claim.paper_value,
                    "value": result.value,
                    "interval_low": interval.low if interval else None,
                    "interval_high": interval.high if interval else None,
                    "interval_kind": interval.kind if interval else None,
                    "criterion": str(claim.criterion),
                    "verdict": result.verdict,
                    "explanation": result.explanation,
                    "commit": folder.commit,
                    "tree": folder.tree,
                }
            )
    return pd.DataFrame(rows, columns=list(COLUMNS))


def verdict_counts(board: pd.DataFrame) -> dict[str, int]:
    """Return how many rows have each verdict; all verdicts are there, in their fixed order."""
    return {verdict: int((board["verdict"] == verdict).sum()) for verdict in VERDICTS}


def write_scoreboard(board: pd.DataFrame, results: str | Path) -> Path:
    """Write `results`/scoreboard.csv and return its path."""
    path = Path(results) / "scoreboard.csv"
    board.to_csv(path, index=False, lineterminator="\n")
    return path
