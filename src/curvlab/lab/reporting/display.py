"""How numbers, tables, recorded facts and figures read on the results page."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import pandas as pd
from PIL import Image

from curvlab.lab.reporting.claims import (
    DIRECTION_ONLY,
    NOT_REPRODUCED,
    OUT_OF_REACH,
    REFUTED,
    REPRODUCED,
    UNDECIDED,
    ClaimResult,
)
from curvlab.lab.reporting.paper_numbers import PaperNumber

MAX_ROWS = {"summary": 10, "table": 5}  # the CSV is linked: the page shows what it is like

MAX_WIDTH = 1600  # pixels of a figure inside the page; sharp on a 2x screen at the page's width
MAX_LOSSLESS_BYTES = 150_000
MEANINGS = {  # of the verdicts, for readers; the rule itself is in claims.py
    REPRODUCED: "the whole interval satisfies the criterion",
    DIRECTION_ONLY: "the whole interval shows the direction, but not all of it satisfies the criterion",
    UNDECIDED: "the interval lies on both sides of a bound, or there are too few seeds for one",
    NOT_REPRODUCED: "the whole interval lies outside the criterion",
    REFUTED: "an exact statement with a counter-example",
    OUT_OF_REACH: "this preset cannot check it",
}


@dataclass(frozen=True)
class DisplayTable:
    """A table as text: column names, rows of cells, and a note on what was left out."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def number_text(value: Any) -> str:
    """Return a number with four significant digits; text as it is; nothing for None and nan."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool | str) or not isinstance(value, Real):
        return str(value)
    number = float(value)
    if isinstance(value, Integral) or (number.is_integer() and abs(number) < 1e6):
        return f"{number:z.0f}"
    return f"{number:.4g}"


def seconds_text(seconds: Any) -> str:
    """Return a duration: "8.1 s", "3 min 20 s", "1 h 05 min"; "" when it is not a number."""
    if not isinstance(seconds, int | float) or math.isnan(seconds):
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def value_text(result: ClaimResult) -> str:
    """Return the measured value with its interval, or "" when nothing was measured."""
    if result.value is None:
        return ""
    text = number_text(result.value) or "nan"
    if result.interval is None:
        return text
    if result.interval.low == result.interval.high == result.value:
        return f"{text} ({result.interval.kind})"
    if math.isnan(result.interval.low) and math.isnan(result.interval.high):
        return f"{text} (no interval: {result.interval.kind})"
    low, high = number_text(result.interval.low) or "?", number_text(result.interval.high) or "?"
    return f"{text} [{low}, {high}] ({result.interval.kind})"


def changes_text(result: ClaimResult) -> list[str]:
    """Return a sentence for each change of the claim's criterion or measure after results were seen."""
    return [f"criterion changed on {change.date}: {change.what}" for change in result.claim.changed]


def frame_table(frame: pd.DataFrame, name: str) -> DisplayTable:
    """Return the head of a result table; of summary.csv more than of table.csv."""
    limit = MAX_ROWS[name.partition(".")[0]]
    rows = tuple(
        tuple(number_text(cell) for cell in row) for row in frame.head(limit).itertuples(index=False, name=None)
    )
    note = f"first {limit} of {len(frame)} rows" if len(frame) > limit else ""
    return DisplayTable(tuple(str(column) for column in frame.columns), rows, note)


def paper_table(numbers: Iterable[PaperNumber]) -> DisplayTable:
    """Return the paper's numbers of one table or figure, one row per printed row.

    Settings of the whole table (row "all") go into the note, or, when there is nothing else, into rows.
    """
    numbers = list(numbers)
    settings = [number for number in numbers if number.row == "all"]
    if len(settings) == len(numbers):
        return DisplayTable(
            ("setting", "value", "unit"),
            tuple((number.column, _printed(number), number.unit) for number in settings),
        )
    rows = dict.fromkeys(number.row for number in numbers if number.row != "all")
    columns = dict.fromkeys(number.column for number in numbers if number.row != "all")
    cells = {(number.row, number.column): _printed(number) for number in numbers}
    return DisplayTable(
        ("row", *columns),
        tuple((row, *(cells.get((row, column), "") for column in columns)) for row in rows),
        "; ".join(f"{number.column} {_printed(number)}" for number in settings),
    )


def settings_table(record: Mapping[str, Any]) -> DisplayTable | None:
    """Return run.json's settings as name, ours, the paper's; None when it has none."""
    entries = record.get("settings") or []
    rows = tuple((str(e.get("name", "")), _listed(e.get("ours")), _listed(e.get("paper"))) for e in entries)
    return DisplayTable(("setting", "ours", "paper"), rows) if rows else None


def run_facts(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what run.json says about device, seeds and cost, as (name, text); absent keys are left out."""
    memory = run.get("peak_memory_bytes")
    facts = [
        ("device", _joined(run.get("device"), run.get("num_threads"), "threads")),
        ("seeds", _listed(run.get("seeds"))),
        ("wall time", seconds_text(run.get("wall_seconds"))),
        ("compute time of all units", seconds_text(run.get("unit_seconds"))),
        ("peak memory", f"{memory / 2**20:,.0f} MiB" if isinstance(memory, int | float) else ""),
        ("matrix-vector products", number_text(run.get("num_matvecs"))),
        ("stored units", _listed(run.get("store"))),
        ("versions", _listed(run.get("versions"))),
        ("data", _listed(run.get("data"))),
    ]
    return [(name, text) for name, text in facts if text]


def reductions(run: Mapping[str, Any]) -> list[str]:
    """Return run.json's `reduced` as a list of sentences."""
    reduced = run.get("reduced") or []
    return [reduced] if isinstance(reduced, str) else [str(entry) for entry in reduced]


def _printed(number: PaperNumber) -> str:
    text = number_text(number.value)
    return text if math.isnan(number.stderr) else f"{text} ± {number_text(number.stderr)}"


def _joined(device: Any, count: Any, unit: str) -> str:
    if not device:
        return ""
    return f"{device}, {count} {unit}" if count else str(device)


def _listed(entries: Any) -> str:
    if isinstance(entries, Mapping):
        return ", ".join(f"{name} {_short(value)}" for name, value in entries.items())
    if isinstance(entries, list | tuple):
        return ", ".join(number_text(entry) for entry in entries)
    return number_text(entries)


def _short(value: Any) -> str:
    """Return a checksum's first twelve characters; anything else in full."""
    text = number_text(value)
    return f"{text[:12]}…" if len(text) >= 32 else text


# ------------------------------------------------------------------------------------ figures
@dataclass(frozen=True)
class PageImage:
    """An image of the page, with its size in pixels so that the page can leave room for it.

    Args:
        name: the file's name.
        source: where a browser finds it: a path relative to the page, or a data URI.
        width: in pixels.
        height: in pixels.
    """

    name: str
    source: str
    width: int
    height: int

    @property
    def is_wide(self) -> bool:
        """Whether it has too many panels side by side to be read at a phone's width."""
        return self.width > 1000


def link_image(path: Path, page_folder: Path) -> PageImage:
    """Return the image by its path relative to the page's folder, which must lie above it.

    Raises:
        OSError, ValueError, SyntaxError: the file is not a readable image; Pillow raises all three.
    """
    with Image.open(path) as file:
        width, height = file.size
        file.verify()  # checksums alone: nothing is decompressed
    return PageImage(path.name, path.relative_to(page_folder).as_posix(), width, height)


def embed_image(path: Path) -> PageImage:
    """Return the image as a WebP data URI, scaled down to `MAX_WIDTH`.

    Line plots stay lossless; what would be larger than `MAX_LOSSLESS_BYTES` (scatter clouds, photographs)
    is compressed with loss. The original stays beside the page.

    Raises:
        OSError, ValueError, SyntaxError: the file is not a readable image; Pillow raises all three.
    """
    with Image.open(path) as file:
        image = file.convert("RGB") if file.mode not in ("RGB", "RGBA") else file.copy()
    if image.width > MAX_WIDTH:
        height = max(1, round(image.height * MAX_WIDTH / image.width))
        image = image.resize((MAX_WIDTH, height), Image.Resampling.LANCZOS)
    data = _webp(image, lossless=True)
    if len(data) > MAX_LOSSLESS_BYTES:
        data = min(data, _webp(image, lossless=False), key=len)
    uri = f"data:image/webp;base64,{base64.b64encode(data).decode('ascii')}"
    return PageImage(path.name, uri, image.width, image.height)


def _webp(image: Image.Image, *, lossless: bool) -> bytes:
    buffer = BytesIO()
    image.save(buffer, "WEBP", lossless=lossless, quality=82)
    return buffer.getvalue()
