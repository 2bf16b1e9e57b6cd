"""Every target composes in every preset."""

from __future__ import annotations

from pathlib import Path

import pytest

from curvlab.runs import load_config

ROOT = Path(__file__).parents[2]
PRESETS = ("smoke", "embedded", "laptop", "paper")
PAPERS = ("lissa", "pbrf", "ginger", "ngd", "rank1", "benchmarks")
TARGETS = [
    str(path.relative_to(ROOT / "conf").with_suffix(""))
    for paper in PAPERS
    for path in sorted((ROOT / "conf" / paper).glob("*.yaml"))
]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("target", TARGETS)
def test_target_composes(target: str, preset: str) -> None:
    cfg = load_config(target, [f"preset={preset}"])
    assert cfg.preset == preset


@pytest.mark.parametrize("target", TARGETS)
def test_config_opens_with_its_make_command(target: str) -> None:
    lines = (ROOT / "conf" / f"{target}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1].startswith("# make ")


@pytest.mark.parametrize("target", TARGETS)
def test_make_knows_the_target(target: str) -> None:
    command = (ROOT / "conf" / f"{target}.yaml").read_text().splitlines()[1].split()[2]
    assert f"\n{command}: " in (ROOT / "Makefile").read_text()
