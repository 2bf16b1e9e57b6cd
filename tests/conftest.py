"""Targets run at smoke scale in this process, and judged or drawn from tables that are made up."""

from __future__ import annotations

import copy
import gc
import importlib.util
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from filelock import FileLock

from tests.warm import Warm, leave_out_what_is_imported

if TYPE_CHECKING:  # not imported here: the process that hands the tests out loads this file, and runs none
    import pandas as pd
    import torch

    from curvlab.lab import ClaimResult, Computed

ROOT = Path(__file__).parents[1]
gc.disable()  # a fifth of the time of all imports; see below


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but for what was imported."""
    leave_out_what_is_imported()


@pytest.fixture(scope="module", autouse=True)
def _leave_out_what_a_module_imported() -> Iterator[None]:
    """Do so after each module, too: a test in which memory runs out makes full collections, 0.3 s each."""
    yield
    leave_out_what_is_imported()


@pytest.fixture(scope="session", autouse=True)
def _configs_are_read_once() -> Iterator[None]:
    """Keep what Hydra reads from conf/, and what it composes of that: tests ask hundreds of times."""
    if "hydra" not in sys.modules:  # nothing that is tested here composes
        yield
        return
    from hydra._internal.config_repository import ConfigRepository
    from hydra.core.global_hydra import GlobalHydra

    from curvlab.lab.runs import overrides

    read, kept, compose, composed = ConfigRepository.load_config, {}, overrides.compose, {}

    def load_config(self: Any, config_path: str) -> Any:
        where = tuple(source.path for source in self.get_sources())
        if str(ROOT / "conf") not in where:
            return read(self, config_path)
        if (where, config_path) not in kept:
            kept[where, config_path] = read(self, config_path)
        return copy.deepcopy(kept[where, config_path])

    def compose_once(config_name: str, lines: list[str], **settings: bool) -> Any:
        where = tuple(source.path for source in GlobalHydra.instance().config_loader().get_sources())
        if str(ROOT / "conf") not in where:
            return compose(config_name, lines, **settings)
        key = (where, config_name, *lines, *settings.items())
        if key not in composed:
            composed[key] = pickle.dumps(compose(config_name, lines, **settings))
        return pickle.loads(composed[key])  # noqa: S301 - our own

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigRepository, "load_config", load_config)
        patch.setattr(overrides, "compose", compose_once)
        yield


@contextmanager
def smoke_scale() -> Iterator[None]:
    """Run in the checkout, and draw figures, but small and not laid out: that is matplotlib's work, half the time.

    The tests of `plots` and `again` lay theirs out. A process apart is a fork: a fresh one imports for 5 s of CPU.
    """
    from curvlab.lab.reporting import plots  # matplotlib comes with it: only where something is drawn

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        if importlib.util.find_spec("wandb"):  # its hooks on imports fail in a fork
            patch.setattr("wandb.sdk.lib.telemetry.list_telemetry_imports", lambda **_: set())
        fork = multiprocessing.get_context("fork")
        patch.setattr(multiprocessing, "get_context", lambda method=None: fork)
        patch.setattr("matplotlib.layout_engine.ConstrainedLayoutEngine.execute", lambda self, figure: None)
        patch.setattr(plots, "_shrink_what_is_cut", lambda drawing: None)
        patch.setattr(plots, "_DPI", 40)
        patch.setattr(plots, "_cut", lambda drawing: [])  # without its layout a text may stand anywhere
        patch.setitem(plots._STYLE, "axes.formatter.use_mathtext", False)  # parsed letter by letter
        yield


def run_at_smoke_scale(key: str, results: Path, *overrides: str, recorded: Path | None = None) -> Path:
    """Run a target; what W&B is told of it goes to `recorded`, where there is one and W&B is installed."""
    from curvlab.lab import all_targets, load_config, run_target

    target, tracker = all_targets()[key], "wandb" if recorded and importlib.util.find_spec("wandb") else "none"
    cfg = load_config(target, ["preset=smoke", f"tracker={tracker}", *overrides])
    if tracker == "wandb":
        cfg.tracker.folder = str(recorded)
    # Where there is a GPU, on it. Set here: as overrides they would be checked, which composes the config again.
    cfg.device, cfg.progress = "auto", False
    cfg.results.root, cfg.store.root = str(results), str(results.parent / "store")
    return run_target(target, cfg)


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """What starts Python commands quickly, each in a process of its own."""
    warm = Warm(tmp_path_factory.mktemp("warm"))
    yield warm
    warm.process.communicate()


@pytest.fixture(scope="session")
def smoke_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs at smoke scale, those of other processes (-n) included: they share one store."""
    own = tmp_path_factory.getbasetemp()
    root = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "smoke"
    root.mkdir(exist_ok=True)
    return root


@pytest.fixture(scope="session")
def smoke_result(smoke_root: Path) -> Callable[[str], Path]:
    """Return a function that gives the result folder of a target at smoke scale: read it, do not change it.

    Each target is run once for all tests; those of a paper one after another, since they share units.
    """

    def result(key: str) -> Path:
        done = smoke_root / f"{key.replace('/', '-')}.done"
        with FileLock(smoke_root / f"{key.partition('/')[0]}.lock"), smoke_scale():
            if not done.exists():
                told = smoke_root / "recorded" / key
                done.write_text(str(run_at_smoke_scale(key, smoke_root / "results", recorded=told)))
        return Path(done.read_text())

    return result


@pytest.fixture(scope="session")
def recorded_runs() -> Callable[[Path], list[dict[str, Any]]]:
    """Return a function that gives what W&B's own reader, `wandb leet`, finds in a folder's offline runs."""

    def runs(folder: Path) -> list[dict[str, Any]]:
        core = pytest.importorskip("wandb.util").get_core_path()
        command = [core, "leet", "inspect", "--summary", "--json", "--run-file"]
        files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
        return [json.loads(subprocess.check_output([*command, file, file.parent.parent])) for file in files]

    return runs


@pytest.fixture(scope="module")
def run_smoke(smoke_root: Path, smoke_result: Callable[[str], Path]) -> Iterator[Callable[..., Path]]:
    """Return a function that gives the result folder of a target, e.g. "ngd/fig6": with overrides, it is run now.

    Units are in <result folder>/../../../../store, those of `smoke_result` among them. With drawn=False the tables
    are judged and no figure is drawn: for tests that read tables of a run that is like one that is drawn.
    """
    own = smoke_root / f"results-{uuid4().hex[:8]}"

    def run(key: str, *overrides: str, drawn: bool = True) -> Path:
        if not overrides:
            return smoke_result(key)
        with pytest.MonkeyPatch.context() as patch:
            if not drawn:
                patch.setattr("curvlab.lab.targets.execution.draw_target", lambda target, folder: None)
            return run_at_smoke_scale(key, own, *overrides)

    with smoke_scale():
        yield run


@pytest.fixture
def computed_of(tmp_path: Path) -> Callable[..., Computed]:
    """Return a function that gives made-up tables, and a config, as a target's `judge` and `draw` read them."""

    from curvlab.lab import Computed

    def computed(tables: Mapping[str, pd.DataFrame], config: dict[str, Any] | None = None) -> Computed:
        for name, table in tables.items():
            table.to_csv(tmp_path / f"{name}.csv", index=False)
        return Computed(tmp_path, config or {})

    return computed


@pytest.fixture
def judged() -> Callable[[str, Computed], list[ClaimResult]]:
    """Return a function that judges a target's claims, all of them, as after a run."""

    from curvlab.lab import all_targets
    from curvlab.lab.targets.execution import judged

    def judge(key: str, computed: Computed) -> list[ClaimResult]:
        return judged(all_targets()[key], computed)

    return judge


@pytest.fixture
def generator() -> torch.Generator:
    """Return a seeded generator."""
    import torch

    return torch.Generator().manual_seed(0)
