from pathlib import Path

import pandas as pd
import pytest

from curvlab.lab.reporting.result_folder import read_results
from curvlab.lab.reporting.scoreboard import scoreboard, verdict_counts, write_scoreboard


def test_one_row_per_claim_and_preset_in_order(results: Path) -> None:
    board = scoreboard(read_results(results))
    assert list(zip(board["target"], board["preset"], board["claim"], strict=True)) == [
        ("lissa-tab3", "embedded", "exact-correlates"),
        ("lissa-fig1", "embedded", "exact-correlates"),
        ("lissa-fig1", "embedded", "steps-enough"),
        ("lissa-fig1", "laptop", "exact-correlates"),
        ("lissa-fig1", "laptop", "steps-enough"),
        ("zeta-fig9", "embedded", "exact-correlates"),  # numbers sort as numbers
        ("zeta-fig9", "embedded", "steps-rest"),
        ("zeta-fig9", "embedded", "theorem"),
        ("zeta-fig10", "embedded", "exact-correlates"),
    ]
    assert verdict_counts(board) == {
        "reproduced": 4,
        "direction only": 1,
        "undecided": 1,
        "not reproduced": 1,
        "refuted": 1,
        "out of reach": 1,
    }


def test_written_rows_carry_value_interval_and_commits(results: Path) -> None:
    path = write_scoreboard(scoreboard(read_results(results)), results)
    board = pd.read_csv(path).set_index(["target", "preset", "claim"])
    row = board.loc[("lissa-fig1", "laptop", "exact-correlates")]
    assert (row["value"], row["low"], row["high"]) == (0.998, 0.995, 0.999)
    assert row["interval"] == "bootstrap 95 %, 25 points"
    assert row["paper_value"] == "points along x = y"
    assert row["units"] == "41 units from 01234567, 3 from fedcba98 with changes"
    assert board.loc[("lissa-fig1", "embedded", "steps-enough"), "units"] == "commits not recorded"
    assert "Measured" not in path.read_text()  # explanations stand in claims.json


def test_empty_results(tmp_path: Path) -> None:
    assert list(verdict_counts(scoreboard(read_results(tmp_path))).values()) == [0] * 6


def test_missing_results_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder 'nowhere' here; make a target first"):
        read_results(tmp_path / "nowhere")
