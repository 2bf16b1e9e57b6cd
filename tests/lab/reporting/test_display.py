import base64
import math
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from curvlab.lab import PaperNumber
from curvlab.lab.reporting import Claim, Criterion, Interval, display, exact, judge
from curvlab.lab.reporting.claims import VERDICTS, Change
from curvlab.lab.reporting.display import MAX_LOSSLESS_BYTES, MAX_WIDTH, PageImage, embed_image, link_image

CLAIM = Claim("c", "s", "Fig. 1", None, "m", Criterion(at_least=0.0))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (math.nan, ""),
        (math.inf, "inf"),
        ("≈ 270", "≈ 270"),
        (True, "True"),
        (3, "3"),
        (np.int64(268336), "268336"),
        (150.0, "150"),
        (0.123456, "0.1235"),
        (np.float32(0.5), "0.5"),
        (1.32e-3, "0.00132"),
        (1e-8, "1e-08"),
        (-0.0, "0"),
        (7e9, "7e+09"),
    ],
)
def test_number_text(value: object, text: str) -> None:
    assert display.number_text(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(8.06, "8.1 s"), (59.99, "60.0 s"), (200, "3 min 20 s"), (3900, "1 h 05 min"), (None, ""), (math.nan, "")],
)
def test_seconds_text(seconds: object, text: str) -> None:
    assert display.seconds_text(seconds) == text


def test_value_text_shows_interval_and_kind() -> None:
    measured = judge(CLAIM, 0.5, Interval(0.4, math.inf, "t 95 %, 3 seeds", 3), if_not_reproduced="-")
    assert display.value_text(measured) == "0.5 [0.4, inf] (t 95 %, 3 seeds)"
    assert display.value_text(judge(CLAIM, 2, exact(2), if_not_reproduced="-")) == "2 (deterministic)"
    failed = judge(CLAIM, math.nan, Interval(math.nan, 1.0, "t", 3), if_not_reproduced="-")
    assert display.value_text(failed) == "nan [?, 1] (t)"
    assert display.value_text(judge(CLAIM, None, None, if_not_reproduced="-")) == ""


def test_frame_table_says_what_it_leaves_out() -> None:
    frame = pd.DataFrame({"step": range(61), "error": 1 / 3})
    table = display.frame_table(frame, "summary.csv")
    assert len(table.rows) == 10
    assert table.rows[2] == ("2", "0.3333")
    assert table.note == "first 10 of 61 rows"
    assert len(display.frame_table(frame, "table.csv").rows) == 5
    assert display.frame_table(frame.head(3), "table.csv").note == ""


def test_every_verdict_is_explained() -> None:
    assert tuple(display.MEANINGS) == VERDICTS


def test_changes_of_a_criterion_are_sentences() -> None:
    assert display.changes_text(judge(CLAIM, 2, exact(2), if_not_reproduced="-")) == []
    changed = replace(CLAIM, changed=(Change("2026-11-20", "bound 0.9 instead of 0.99"),))
    result = judge(changed, 2, exact(2), if_not_reproduced="-")
    assert display.changes_text(result) == ["criterion changed on 2026-11-20: bound 0.9 instead of 0.99"]


def number(row: str, column: str, value: float, stderr: float = math.nan) -> PaperNumber:
    return PaperNumber("Table 1", row, column, value, stderr, "nats", str(value))


def test_paper_table_has_a_row_per_printed_row_and_settings_below() -> None:
    table = display.paper_table(
        [number("A", "trace", 2.0, 0.5), number("B", "steps", 3.0), number("all", "damping", 5.0)]
    )
    assert table.columns == ("row", "trace", "steps")
    assert table.rows == (("A", "2 ± 0.5", ""), ("B", "", "3"))
    assert table.note == "damping 5"


def test_paper_table_of_settings_only() -> None:
    assert display.paper_table([number("all", "damping", 5.0)]).rows == (("damping", "5", "nats"),)


def test_settings_table_lists_ours_beside_the_papers() -> None:
    settings = [{"name": "points", "ours": [3, 5], "paper": 25}, {"name": "seeds", "ours": "all", "paper": None}]
    table = display.settings_table({"settings": settings})
    assert table.columns == ("setting", "ours", "paper")
    assert table.rows == (("points", "3, 5", "25"), ("seeds", "all", ""))
    assert display.settings_table({}) is None


def test_run_facts_leave_out_what_is_missing() -> None:
    assert display.run_facts({}) == []
    facts = dict(
        display.run_facts(
            {"device": "cpu", "num_threads": 2, "peak_memory_bytes": 2**30, "unit_seconds": 70.0}
            | {"data": {"mnist": "ab" * 32}, "seeds": 0, "store": {"hits": 2, "misses": 0}, "wall_seconds": "odd"}
        )
    )
    assert facts == {
        "device": "cpu, 2 threads",
        "seeds": "0",
        "compute time of all units": "1 min 10 s",
        "peak memory": "1,024 MiB",
        "stored units": "hits 2, misses 0",
        "data": "mnist abababababab…",
    }


def test_reductions_are_always_sentences() -> None:
    assert display.reductions({}) == []
    assert display.reductions({"reduced": "one model"}) == ["one model"]
    assert display.reductions({"reduced": ["a", 2]}) == ["a", "2"]


def decoded(image: PageImage) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(base64.b64decode(image.source.partition("base64,")[2]))).convert("RGB"))


def save(path: Path, pixels: np.ndarray) -> Path:
    Image.fromarray(pixels.astype(np.uint8)).save(path)
    return path


def test_small_figure_stays_exact(tmp_path: Path) -> None:
    pixels = np.full((60, 80, 3), 255)
    pixels[20, :, 0] = 17
    image = embed_image(save(tmp_path / "figure.png", pixels))
    assert (image.name, image.width, image.height, image.is_wide) == ("figure.png", 80, 60, False)
    assert np.array_equal(decoded(image), pixels)


def test_large_figure_is_scaled_and_compressed(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, size=(400, 2 * MAX_WIDTH, 3))
    path = save(tmp_path / "figure.png", noise)
    image = embed_image(path)
    assert (image.width, image.height, image.is_wide) == (MAX_WIDTH, 200, True)
    assert path.stat().st_size > MAX_LOSSLESS_BYTES
    assert len(image.source) < path.stat().st_size / 5
    assert decoded(image).shape == (200, MAX_WIDTH, 3)


def test_link_is_relative_to_the_page(tmp_path: Path) -> None:
    (tmp_path / "lissa" / "fig1").mkdir(parents=True)
    path = save(tmp_path / "lissa" / "fig1" / "figure.png", np.zeros((60, 1200, 3)))
    assert link_image(path, tmp_path) == PageImage("figure.png", "lissa/fig1/figure.png", 1200, 60)


@pytest.mark.parametrize("keep", [0, 0.5])
def test_damaged_figure_raises(tmp_path: Path, keep: float) -> None:
    path = save(tmp_path / "figure.png", np.random.default_rng(0).integers(0, 255, size=(60, 80, 3)))
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)] or b"no image")
    for read in (embed_image, lambda each: link_image(each, tmp_path)):
        with pytest.raises((OSError, SyntaxError), match=r"cannot identify|(?i:truncated)|broken PNG"):
            read(path)
