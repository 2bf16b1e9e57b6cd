"""Made-up tables judged by claim, configs at smoke scale, and a run that keeps its units in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from curvlab.lab import ClaimResult, all_targets, load_config


@pytest.fixture
def results_of(computed_of, judged) -> Callable[..., dict[str, ClaimResult]]:
    """Return a function that judges made-up tables: results by the claims' ids, the task's name taken off."""

    def results(key: str, tables: Any, config: Any = None, task: str = "m") -> dict[str, ClaimResult]:
        return {
            result.claim.id.removesuffix(f"-{task}"): result for result in judged(key, computed_of(tables, config))
        }

    return results


@pytest.fixture
def verdicts_of(results_of) -> Callable[..., dict[str, str]]:
    """Return a function that judges made-up tables: verdicts by the claims' ids, the task's name taken off."""
    return lambda *given, **more: {name: result.verdict for name, result in results_of(*given, **more).items()}


@pytest.fixture
def config_of(tmp_path: Path) -> Callable[..., Any]:
    """Return a function that gives a target's config at smoke scale, with a store of this test alone."""
    folders = [f"results.root={tmp_path / 'results'}", f"store.root={tmp_path / 'store'}"]
    settings = ["preset=smoke", "tracker=none", "progress=false", *folders]
    return lambda key, *overrides: load_config(all_targets()[key], [*settings, *overrides])


class StubRun:
    """Computes a unit once, keeps it and its key in memory, and draws numbers by the streams' names."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.stored: dict[str, Any] = {}
        self.keys: dict[str, Any] = {}

    def unit(
        self, name: str, key: Any, compute: Any, *, version: int, about: str = "", resumes: bool = False
    ) -> Any:
        self.keys[name], place = key, json.dumps([name, key, version], sort_keys=True)
        if place not in self.stored:
            self.stored[place] = compute(Path("not needed")) if resumes else compute()
        return self.stored[place]

    def generator(self, *names: object) -> torch.Generator:
        return torch.Generator().manual_seed(sum(str(names).encode()))

    def record_data(self, name: str, checksum: str) -> None: ...

    def add_matvecs(self, count: int) -> None: ...

    def progress(self, iterable: Any, description: str) -> Any:
        return iterable

    def bar(self, description: str) -> bool:
        return False


@pytest.fixture
def stub_run() -> StubRun:
    """Return a run without a store."""
    return StubRun()
