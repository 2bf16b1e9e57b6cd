from __future__ import annotations

import shlex

import pytest
from omegaconf import OmegaConf

from curvlab.lab.runs.command import Command

NAME = ("lissa-fig1", "experiments.lissa.fig1")
NEUTRAL = (
    "preset=laptop",
    "force=true",
    "progress=false",
    "device=cuda",
    "tracker=none",
    "tracker.mode=online",
    "store.root=/a",
    "results.root=/b",
    "data.root=/c",
    "hydra.verbose=true",
    "hydra/launcher=basic",
    "+hydra.job.env_set.X=1",
)


def folder(*overrides: str) -> str:
    return Command(*NAME, overrides).folder_name("laptop")


def test_neutral_overrides_keep_the_published_folder() -> None:
    assert folder(*NEUTRAL) == "laptop"


def test_other_overrides_get_a_folder_of_their_own() -> None:
    assert folder("preset=laptop", "model=lenet", "damping=0.1") == "laptop+damping=0.1,model=lenet"
    assert folder("damping=0.1", "model=lenet") == folder("model=lenet", "damping=0.3", "damping=0.1")
    assert folder("seed=1") == "laptop+seed=1"
    assert folder("data.rooted=1") == "laptop+data.rooted=1"


@pytest.mark.parametrize("first", ["widths=[1,2]", "name=a/b", "name='../../x'"])
def test_unsafe_characters_leave_but_names_stay_distinct(first: str) -> None:
    cleaned = folder(first)
    assert set(cleaned) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.,=~+-")
    assert cleaned != folder(first.translate(str.maketrans("[]/'", "____")))


def test_long_names_are_cut_and_stay_distinct() -> None:
    names = {folder(*(f"group{k}.setting={k}" for k in range(12)), f"last={x}") for x in range(3)}
    assert len(names) == 3
    assert max(map(len, names)) <= 80


def test_make_line_reruns_in_a_shell() -> None:
    assert Command(*NAME, NEUTRAL).make_line("laptop") == "make lissa-fig1 PRESET=laptop"
    line = Command(*NAME, ("model=lenet", "solver.damping=0.1")).make_line("laptop")
    assert line == 'make lissa-fig1 PRESET=laptop ARGS="model=lenet solver.damping=0.1"'
    tricky = ("name='a $b'", 'x="q"')
    words = shlex.split(Command(*NAME, tricky).make_line("laptop"))
    arguments = words[-1].removeprefix("ARGS=").replace("$$", "$")  # what make hands to its shell
    assert tuple(shlex.split(arguments)) == tuple(sorted(tricky))


def test_python_line_names_the_module() -> None:
    line = Command(*NAME, ("preset=laptop", "model=lenet", "tracker=none")).python_line("laptop")
    assert line == "python -m experiments.lissa.fig1 preset=laptop model=lenet"
    assert Command().python_line("laptop") == ""


def test_command_travels_in_the_config() -> None:
    cfg = OmegaConf.create({"seed": 0})
    OmegaConf.set_struct(cfg, True)
    assert Command.of(cfg) == Command()
    command = Command(*NAME, ("seed=1",))
    assert Command.of(command.attach(cfg)) == command
