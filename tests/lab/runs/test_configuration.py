from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from curvlab.lab.runs.configuration import Entry, load_config
from curvlab.lab.runs.overrides import ConfigurationError

Demo = Callable[..., subprocess.CompletedProcess[str]]


def test_default_preset_is_embedded_and_readable(entry: Entry) -> None:
    cfg = load_config(entry)
    assert (cfg.preset, cfg.num_train, cfg.data.name, cfg.damping) == ("embedded", 5, "digits", 1.0)
    assert (cfg.tracker.name, cfg.tracker.mode) == ("wandb", "offline")
    assert (cfg.store.root, cfg.results.root) == (".cache/store", "results")
    assert "hydra" not in cfg


def test_data_and_values_override_the_preset(entry: Entry) -> None:
    cfg = load_config(entry, ["preset=laptop", "data=digits", "num_train=3"])
    assert (cfg.preset, cfg.data.name, cfg.num_train) == ("laptop", "digits", 3)
    assert load_config(entry, ["preset=laptop"]).data.name == "mnist"
    assert list(cfg.command.overrides) == ["preset=laptop", "data=digits", "num_train=3"]


def test_store_root_follows_the_environment(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CURVLAB_STORE", "elsewhere")
    assert load_config(entry).store.root == "elsewhere"


@pytest.mark.parametrize(
    ("overrides", "texts"),
    [
        (
            ["sovler.rtol=1"],
            ["unknown key 'sovler.rtol'", "did you mean 'solver.rtol'", "Keys: .*damping.*solver"],
        ),
        (
            ["solver.rtoll=1"],
            ["unknown key 'solver.rtoll'", "did you mean 'solver.rtol'", "'solver': .*max_steps"],
        ),
        (["solver=lissa", "solver.rtol=1"], ["unknown key 'solver.rtol'", "'solver': _target_, step_size"]),
        (["num_trian=3"], ["unknown key 'num_trian'", "did you mean 'num_train'"]),
        (["dta=digits"], ["unknown key 'dta'", "did you mean 'data'"]),
        (["+num_trian=3"], ["unknown key 'num_trian'", "did you mean 'num_train'"]),
        (["++num_trian=3"], ["unknown key 'num_trian'"]),
        (["~dampng"], ["unknown key 'dampng'", "did you mean 'damping'"]),
        (["hydra.job.chdr=true"], ["unknown key 'hydra.job.chdr'", "'hydra.job': .*chdir"]),
        (["tracker=none", "tracker.mode=online"], ["unknown key 'tracker.mode'", "'tracker': name"]),
        (["preset=foo"], ["unknown choice 'foo' for 'preset'", "embedded, laptop, paper, smoke"]),
        (["preset=labtop"], ["unknown choice 'labtop'", "did you mean 'laptop'"]),
        (["data=mnits"], ["unknown choice 'mnits' for 'data'", "did you mean 'mnist'", "digits, mnist"]),
        (["+model=mpl"], ["unknown choice 'mpl' for 'model'", "did you mean 'mlp'"]),
        (["tracker=wandbb"], ["did you mean 'wandb'", "none, wandb"]),
        (["preset=paper"], ["unknown choice 'paper' for 'toy/fig1'", "embedded, laptop, smoke"]),
        (["model=mlp"], ["toy/fig1/target has no 'model' to choose", "data, preset, solver, toy/fig1, tracker"]),
        (["+model=mlp"], ["toy/fig1/target has no 'model' to choose"]),
        (["damping=["], [r"cannot read 'damping=\['", "key=value"]),
        (["damping"], ["cannot read 'damping'", "key=value"]),
        (["preset=smoke,laptop"], ["Ambiguous value for argument 'preset=smoke,laptop'"]),
    ],
)
def test_wrong_override_is_refused_with_what_was_meant(
    entry: Entry, overrides: list[str], texts: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_config(entry, overrides)
    for text in texts:
        assert re.search(text, str(refused.value)), str(refused.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["+solver.tolerance=1"],  # an argument for a class, which checks it itself
        ["solver.rtol=null", "damping=0.1", "seed=3"],
        ["++damping=2", "data=mnist"],
        ["hydra.job.chdir=false"],
        ["~damping"],
    ],
)
def test_good_overrides_pass(entry: Entry, overrides: list[str]) -> None:
    load_config(entry, overrides)


def test_short_forms_are_expanded_and_recorded_as_typed(entry: Entry) -> None:
    def expand(config_name: str, overrides: Sequence[str]) -> dict[str, str]:
        assert config_name == "toy/fig1/target"
        return {word.replace("n=", "num_train="): word for word in overrides} | {"damping=2": "n=7"}

    cfg = load_config(replace(entry, expand=expand), ["preset=smoke", "n=7"])
    assert (cfg.num_train, cfg.damping) == (7, 2)
    assert list(cfg.command.overrides) == ["preset=smoke", "n=7"]
    assert cfg.command.make_target == "toy-fig1"


def test_command_line_runs_the_task_quietly(demo: Demo, checkout: Path) -> None:
    done = demo("preset=laptop", "data=digits", "num_train=3")
    assert done.stdout == "laptop digits 3 0 ['preset=laptop', 'data=digits', 'num_train=3']\n"
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in (checkout / "outputs").rglob("*") if path.is_file()] == []


def test_multirun_sweeps_presets_and_seeds(demo: Demo, checkout: Path) -> None:
    done = demo("-m", "preset=smoke,laptop", "seed=range(2)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{preset} {data} {seed} ['preset={preset}', 'seed={seed}']"
        for preset, data in (("smoke", "digits 2"), ("laptop", "mnist 25"))
        for seed in (0, 1)
    ]
    assert not (checkout / "multirun").exists()


def test_multirun_refuses_before_the_first_job(demo: Demo) -> None:
    # Only solver=cg has rtol, so the second half of the sweep would fail.
    done = demo("-m", "solver=cg,lissa", "solver.rtol=0.1,0.2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown key 'solver.rtol'" in done.stderr


def test_mistyped_override_exits_with_status_2(demo: Demo) -> None:
    done = demo("preset=labtop")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: unknown choice 'labtop' for 'preset'; did you mean 'laptop'?\n"
        "Choices of 'preset': embedded, laptop, paper, smoke.\n"
    )


def test_help_and_cfg_work(demo: Demo) -> None:
    assert "Powered by Hydra" in demo("--help").stdout
    shown = demo("--cfg", "job", "preset=smoke")
    assert shown.returncode == 0
    assert "num_train: 2" in shown.stdout
    assert demo("--cfg", "job", "prset=smoke").returncode == 2
