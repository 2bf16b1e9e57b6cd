import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from curvlab.lab.reporting import (
    Claim,
    ClaimResult,
    Criterion,
    Interval,
    exact,
    judge,
    load_claims,
    out_of_reach,
    save_claims,
)
from curvlab.lab.reporting.claims_file import rerun_command


def some_results() -> list:
    def claim(name: str, paper_value: float | str | None) -> Claim:
        return Claim(
            name, "λ & <η>", "Fig. 1", paper_value, "Pearson", Criterion(at_least=0.1, direction_at_least=0)
        )

    third = 1 / 3
    return [
        judge(claim("a", 2.5e-4), third, Interval(0.1, 0.7, "t 95 %, 3 seeds", 3), if_not_reproduced="-"),
        judge(claim("b", "a line"), 0.1, Interval(0.0, math.inf, "t", 3), if_not_reproduced="noise"),
        judge(claim("c", None), 0.1, Interval(-math.inf, 0.2, "t", 3), if_not_reproduced="noise"),
        judge(claim("d", None), None, None, if_not_reproduced="failed"),
        out_of_reach(claim("e", None), "needs ImageNet"),
        judge(
            replace(claim("f", 1), criterion=Criterion(at_most=1.0, exact=True)),
            1.5,
            exact(1.5),
            if_not_reproduced="H = diag(1, -1)",
        ),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "lissa" / "fig1" / "laptop"


def test_what_is_saved_is_loaded(folder: Path) -> None:
    save_claims(folder, some_results())
    assert load_claims(folder) == some_results()
    assert [path.name for path in folder.iterdir()] == ["claims.json"]  # no temporary left behind


def test_nan_survives_as_valid_json(folder: Path) -> None:
    claim = some_results()[0].claim
    interval = Interval(math.nan, math.nan, "t 95 %, 1 seed", 1)
    save_claims(folder, [judge(claim, math.nan, interval, if_not_reproduced="one seed")])
    text = (folder / "claims.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    loaded = load_claims(folder)[0]
    assert math.isnan(loaded.value)
    assert math.isnan(loaded.interval.low)


def test_failed_write_leaves_the_old_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_claims(folder, some_results())
    before = (folder / "claims.json").read_bytes()

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_claims(folder, some_results()[:1])
    assert (folder / "claims.json").read_bytes() == before
    assert len(list(folder.iterdir())) == 1


def first_version(folder: Path, *, verdict: str, explanation: str, **changes: object) -> ClaimResult:
    """Write one claim as the first version of the file had it, and load it."""
    save_claims(folder, some_results()[:1])
    content = json.loads((folder / "claims.json").read_text())
    entry = content["claims"][0] | {"verdict": verdict, "explanation": explanation}
    del entry["claim"]["criterion"]["exact"]
    content = {"schema_version": 1, "claims": [entry | changes]}
    (folder / "claims.json").write_text(json.dumps(content))
    return load_claims(folder)[0]


TWO_SEEDS = {"low": 0.2, "high": 0.4, "kind": "t 95 %, 2 seeds", "num_samples": 2}
BOTH_SIDES = {"low": -0.1, "high": 0.4, "kind": "t 95 %, 3 seeds", "num_samples": 3}


@pytest.mark.parametrize(
    ("verdict", "explanation", "changes", "expected"),
    [
        ("reproduced", "", {}, ("reproduced", "")),
        (
            "reproduced",
            "",
            {"interval": TWO_SEEDS},
            (
                "undecided",
                "Measured 0.3333 (0.2 to 0.4); needed: at least 0.1 (direction: at least 0). "
                "Fewer than 3 seeds decide nothing.",
            ),
        ),
        ("not reproduced", "Noise.", {"interval": BOTH_SIDES}, ("undecided", "Noise.")),
        ("not reproduced", "No such run.", {"value": None, "interval": None}, ("out of reach", "No such run.")),
        ("out of reach", "Too large.", {"value": None, "interval": None}, ("out of reach", "Too large.")),
    ],
)
def test_first_version_is_decided_again(
    folder: Path, verdict: str, explanation: str, changes: dict, expected: tuple[str, str]
) -> None:
    result = first_version(folder, verdict=verdict, explanation=explanation, **changes)
    assert (result.verdict, result.explanation) == expected
    save_claims(folder, [result])
    assert load_claims(folder) == [result]


def test_refuses_repeated_ids(folder: Path) -> None:
    with pytest.raises(ValueError, match="unique within a target, repeated: a"):
        save_claims(folder, some_results()[:1] * 2)


def hand_edited(content: dict) -> dict:
    content["claims"][1]["verdict"] = "reproduced"
    return content


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "null",
        lambda text: text.replace('"schema_version": 2', '"schema_version": 99'),
        lambda text: text.replace('"criterion"', '"criterium"'),
        lambda text: text.replace('"low"', '"lo"'),
        lambda text: json.dumps(hand_edited(json.loads(text))),
    ],
)
def test_damaged_file_is_named_with_the_command(folder: Path, damage: object) -> None:
    save_claims(folder, some_results())
    path = folder / "claims.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(
        ValueError, match=r"lissa/fig1/laptop/claims\.json is damaged .*run `make lissa-fig1 PRESET=laptop` again"
    ):
        load_claims(folder)


def test_binary_file_is_damaged(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "claims.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"is damaged \(UnicodeDecodeError"):
        load_claims(folder)


def test_missing_file_is_named_with_the_command(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"claims\.json is missing: run `make lissa-fig1 PRESET=laptop` again"):
        load_claims(folder)


def test_rerun_command_of_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert rerun_command("ngd/fig2/embedded") == "make ngd-fig2 PRESET=embedded"
