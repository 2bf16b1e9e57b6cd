"""Targets run at smoke scale in this process, and judged or drawn from tables that are made up."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from filelock import FileLock

from curvlab.lab import ClaimResult, Computed, all_targets, load_config, run_target
from curvlab.lab.targets.execution import judged as judged_claims


@pytest.fixture(scope="module")
def run_smoke(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """Return a function that runs a target, e.g. "ngd/fig6", with overrides, and gives its result folder.

    All runs of a test module share one store, <result folder>/../../../../store. Figures are drawn but not laid
    out, which is matplotlib's work and half of a figure's time; the tests of `plots` and `again` lay theirs out.
    """
    root = tmp_path_factory.mktemp("smoke")

    def run(key: str, *overrides: str) -> Path:
        target = all_targets()[key]
        folders = [f"results.root={root / 'results'}", f"store.root={root / 'store'}"]
        cfg = load_config(target, ["preset=smoke", "tracker=none", "progress=false", *folders, *overrides])
        return run_target(target, cfg)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parents[1])
        patch.setattr("matplotlib.layout_engine.ConstrainedLayoutEngine.execute", lambda self, figure: None)
        yield run


@pytest.fixture(scope="session")
def smoke_result(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the result folder of a target at smoke scale: read it, do not change it.

    Each target is run once for all tests, those of other processes (-n) included, and all share one store.
    """
    own = tmp_path_factory.getbasetemp()
    root = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "smoke"

    def result(key: str) -> Path:
        root.mkdir(exist_ok=True)
        with FileLock(root / f"{key.replace('/', '-')}.lock"), pytest.MonkeyPatch.context() as patch:
            patch.chdir(Path(__file__).parents[1])
            patch.setattr("matplotlib.layout_engine.ConstrainedLayoutEngine.execute", lambda self, figure: None)
            done = root / f"{key.replace('/', '-')}.done"
            if not done.exists():
                folders = [f"results.root={root / 'results'}", f"store.root={root / 'store'}"]
                overrides = ["preset=smoke", "tracker=none", "progress=false", *folders]
                done.write_text(str(run_target(all_targets()[key], load_config(all_targets()[key], overrides))))
            return Path(done.read_text())

    return result


@pytest.fixture
def computed_of(tmp_path: Path) -> Callable[..., Computed]:
    """Return a function that gives made-up tables, and a config, as a target's `judge` and `draw` read them."""

    def computed(tables: Mapping[str, pd.DataFrame], config: dict[str, Any] | None = None) -> Computed:
        for name, table in tables.items():
            table.to_csv(tmp_path / f"{name}.csv", index=False)
        return Computed(tmp_path, config or {})

    return computed


@pytest.fixture
def judged() -> Callable[[str, Computed], list[ClaimResult]]:
    """Return a function that judges a target's claims, all of them, as after a run."""

    def judge(key: str, computed: Computed) -> list[ClaimResult]:
        return judged_claims(all_targets()[key], computed)

    return judge


@pytest.fixture
def generator() -> torch.Generator:
    """Return a seeded generator."""
    return torch.Generator().manual_seed(0)
