"""What holds of every target: its rooms and configs, and that it runs at smoke scale."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from PIL import Image

from curvlab.lab import Computed, all_targets, load_config, task_settings
from curvlab.lab.claims import load_claim_sheet, load_claims
from curvlab.lab.runs.overrides import refuse_out_of_range
from curvlab.lab.targets.settings import MISSING, ours
from curvlab.lab.targets.target import published

# --- Rules of the experiments: papers stand alone, what is published names its code, ours is read and never typed
ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"
SHARED = {"papers", "shared", "target"}  # folders that anyone may import
TARGETS = all_targets()


@cache
def trees(folder: Path = EXPERIMENTS) -> list[tuple[Path, ast.Module]]:
    return [(path.relative_to(EXPERIMENTS), ast.parse(path.read_text())) for path in sorted(folder.rglob("*.py"))]


def imported_folders(tree: ast.Module) -> set[str]:
    """Return the folders of experiments that a module imports from, imports inside functions included."""
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[1] for name in names if name.startswith("experiments.")}


def calls(tree: ast.Module, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            yield node


def test_no_paper_imports_another() -> None:
    found = {}
    for path, tree in trees():
        others = imported_folders(tree) - SHARED - {path.parts[0]}
        if path.parts[0] != "target" and others:
            found[path.as_posix()] = others
    assert found == {}


def test_what_is_shared_imports_no_paper() -> None:
    for folder in SHARED:
        for path, tree in trees(EXPERIMENTS / folder):
            assert imported_folders(tree) <= SHARED, path


def test_every_unit_of_work_has_a_version() -> None:
    without = [
        f"{path}:{call.lineno}"
        for path, tree in trees()
        for call in calls(tree, "unit")
        if "version" not in {keyword.arg for keyword in call.keywords}
    ]
    assert without == []


def test_ours_is_never_typed() -> None:
    typed = []
    for path, tree in trees():
        if path.parts[0] == "target":
            continue  # it reads ours from the config and the tables
        constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value == "ours"]
        typed += [f"{path}:{node.lineno}" for node in constants]
        typed += [
            f"{path}:{call.lineno}"
            for call in calls(tree, "note")
            if {keyword.arg for keyword in call.keywords} & {"scale", "settings"}
        ]
    assert typed == []


def test_why_a_preset_does_not_decide_a_claim_holds_no_number_of_ours() -> None:
    names = r"`[^`]*`|ResNet-50|VGG-13|epsilon = 1e-8|C = 2|C as measured is below 1\b"
    sheets = {target.claims_file for target in TARGETS.values()}
    assert {path.parent.parent.name for path in sheets if path} > {
        "experiments",
        "benchmarks",
    }  # folders' own, too
    for path in filter(None, sheets):
        asked = yaml.safe_load(path.read_text(encoding="utf-8")).get("not_asked") or {}
        for reason in {reason for reasons in asked.values() for reason in reasons.values()}:
            assert not re.search(r"(?<![\w-])\d", re.sub(names, "", reason)), f"{path}: {reason}"


def test_the_checks_above_find_what_they_look_for() -> None:
    tree = ast.parse("from experiments.ngd.fig1 import x\nrun.unit('a', {}, f)\nrun.note(scale={'ours': 1})")
    assert imported_folders(tree) == {"ngd"}
    assert len(list(calls(tree, "unit"))) == len(list(calls(tree, "note"))) == 1


def test_published_results_name_the_commits_of_their_units() -> None:
    for _, folder in published(ROOT / "results"):
        record = json.loads((folder / "run.json").read_text())
        where = folder.relative_to(ROOT).as_posix()
        for unit in record["units"]:
            assert {"name", "version", "function", "commit", "clean", "count"} <= set(unit), where
        for act in ("assembled", "judged", "drawn"):
            assert record[act]["commit"], where


def test_every_result_belongs_to_a_target() -> None:
    found = {"/".join(path.parts[-4:-2]) for path in (ROOT / "results").glob("*/*/*/run.json")}
    assert found <= set(all_targets())


def test_no_committed_file_is_large() -> None:
    sizes = {path.relative_to(ROOT).as_posix(): path.stat().st_size for path in (ROOT / "results").rglob("*.*")}
    assert [name for name, size in sizes.items() if size > 2_000_000] == []


# --- Every target composes in every preset, and knows its settings beside the paper's
PRESETS = ("embedded", "laptop", "paper")  # smoke is composed, and run, below


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("key", TARGETS)
def test_target_composes(key: str, preset: str) -> None:
    target = TARGETS[key]
    cfg = load_config(target, [f"preset={preset}"])
    assert cfg.preset == preset
    kept = {name for name, own in (cfg.get("tasks") or {}).items() if own is not None}
    assert set(task_settings(cfg)) == kept
    # An override of a task that the defaults do not list makes one up, and its own then runs unchanged.
    assert [name for name in kept if "data" not in cfg.tasks[name]] == []
    found = ours([name for name in target.paper_settings if ".csv:" not in name], cfg, {})
    assert [name for name, value in found.items() if value == MISSING] == []
    check_ranges(OmegaConf.to_container(cfg, resolve=True))


def check_ranges(config: Any) -> None:
    """Of every number what stands is in its range, and a negative one or a text is not."""
    numbers = 0
    for name, stands in settings_of(config):
        refuse_out_of_range(name, stands, stands)
        first = stands[0] if isinstance(stands, list) and stands else stands
        if isinstance(first, int | float) and not isinstance(first, bool):
            numbers += 1
            for bad in ["text", *([] if name in ("start", "starts") else [-1])]:
                with pytest.raises(ValueError, match=f"{name} must be "):
                    refuse_out_of_range(name, [bad] if first is not stands else bad, stands)
    assert numbers > 2


def settings_of(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting with its name; a list of a list has the same."""
    if isinstance(node, dict):
        for key, own in node.items():
            yield from settings_of(own, str(key))
    elif isinstance(node, list) and any(isinstance(own, dict | list) for own in node):
        for own in node:
            yield from settings_of(own, name)
    else:
        yield name, node


@pytest.mark.parametrize("key", TARGETS)
def test_target_has_its_rooms(key: str) -> None:
    target = TARGETS[key]
    assert target.description.splitlines()[2].startswith(f"make {target.make_name} "), (
        "the docstring shows how to run it"
    )
    assert [callable(target.load(room)) for room in ("compute", "draw")] == [True, True]
    entries = {} if target.claims_file is None else load_claim_sheet(target.claims_file).entries
    if any("value" not in entry for entry in entries.values()):
        assert callable(target.load("judge"))
    assert set(target.after) <= set(TARGETS)


@pytest.mark.parametrize("key", TARGETS)
def test_config_opens_with_its_make_command(key: str) -> None:
    lines = (ROOT / "conf" / f"{key}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1].startswith(f"# make {TARGETS[key].make_name} ")


def test_every_config_with_a_make_command_is_of_a_target() -> None:
    paths = [path for path in (ROOT / "conf").glob("*/*.yaml") if path.parent.name != "sweep"]
    opened = [path for path in paths if "\n# make " in path.read_text(encoding="utf-8")]
    assert {f"{path.parent.name}/{path.stem}" for path in opened} == set(TARGETS)


# --- Every target computes, judges and draws at smoke scale, end to end
# bench-attribution starts a Python for each library: its parts have tests of their own.
RUN = [key for key in TARGETS if key != "benchmarks/attribution"]


@pytest.mark.parametrize("key", RUN)
def test_target_at_smoke_scale(smoke_result: Callable[[str], Path], key: str) -> None:
    folder = smoke_result(key)
    assert (folder / "run.json").is_file()
    tables = Computed.of(folder)
    assert {name for name, table in tables.items() if len(table) == 0} == set()
    assert len(tables)
    if TARGETS[key].claims_file is not None:
        assert load_claims(folder)  # of every claim of the sheet, or the run would have failed
    figures = list(folder.glob("*.png"))
    assert folder / "figure.png" in figures
    for path in figures:
        assert np.asarray(Image.open(path).convert("L")).std() > 10, f"{path.name} is empty"


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "conf" / "sweep").glob("*.yaml")))
def test_the_last_job_of_every_sweep_is_computed_and_judged(run_smoke: Callable[..., Path], name: str) -> None:
    (said,) = re.findall(rf"(?m)^# make (\S+) ARGS=sweep={name}\b", (ROOT / f"conf/sweep/{name}.yaml").read_text())
    named = {target.make_name: target for target in TARGETS.values()} | {"TARGET": TARGETS["rank1/fisher"]}
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose(named[said].key, [f"sweep={name}"], return_hydra_config=True).hydra
    assert cfg.mode.name == "MULTIRUN"
    swept = {key: re.findall(r"(?:\[.*?\]|[^,])+", values) for key, values in cfg.sweeper.params.items()}
    last = [f"{key}={values[-1]}" for key, values in swept.items()]
    verdicts = [each.verdict for each in load_claims(run_smoke(named[said].key, *last, drawn=False))]
    assert len(set(verdicts) - {"out of reach"}) > 0, "nothing was judged"


@pytest.mark.parametrize("key", RUN)
def test_what_the_dashboard_names_is_in_the_summary_of_an_offline_run(
    smoke_result: Callable[[str], Path],
    smoke_root: Path,
    recorded_runs: Callable[[Path], list[dict[str, Any]]],
    key: str,
) -> None:
    smoke_result(key)
    (run,) = recorded_runs(smoke_root / "recorded" / key)
    target, told = TARGETS[key], run["summary"]
    committed = json.loads((ROOT / "results" / target.paper_key / "dashboard.json").read_text(encoding="utf-8"))
    sections = committed["workspace"]["section"]["panelBankConfig"]["sections"]
    (panels,) = (own["panels"] for own in sections if own["name"].startswith(f"{target.make_name}: "))
    settings = [panel["config"] for panel in panels]
    keys = {name for own in settings for of in ("metrics", "mediaKeys") for name in own.get(of, ())}
    keys |= {own["xAxis"] for own in settings if own.get("xAxis", "_step") != "_step"}
    assert {"figure", "cost/products", "progress/seconds"} <= keys
    assert keys - set(told) == set()
    patterns = [own["metricRegex"] for own in settings if own.get("useMetricRegex")]
    assert len(patterns) >= len(target.curves)
    assert [pattern for pattern in patterns if not any(re.search(pattern, name) for name in told)] == []
