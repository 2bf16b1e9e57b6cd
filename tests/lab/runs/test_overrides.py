from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import hydra
import pytest

from curvlab.lab import ConfigurationError, all_targets, load_config
from curvlab.lab.runs.overrides import checked_config, expand
from tests.refusals import refuses

ROOT = Path(__file__).parents[3]
FIG1, FIG6, TAB6, THM1 = (all_targets()[key] for key in ("lissa/fig1", "ngd/fig6", "pbrf/tab6", "lissa/thm1"))
TASKS = ["ffnn_32_32_digits", "ffnn_6_6_digits_640"]  # of its embedded preset


def test_data_and_its_keys_mean_every_task() -> None:
    cfg = load_config(FIG6, ["data=breast_cancer", "data.num_train=50", "model.activation=gelu"])
    assert list(cfg.tasks) == TASKS
    for name in TASKS:
        assert cfg.tasks[name].data._target_.endswith("breast_cancer")
        assert (cfg.tasks[name].data.num_train, cfg.tasks[name].model.activation) == (50, "gelu")
    # The record has what was typed, not what it was made into.
    assert list(cfg.command.overrides) == ["data=breast_cancer", "data.num_train=50", "model.activation=gelu"]


def test_task_names_the_one_that_is_run() -> None:
    cfg = load_config(FIG6, ["task=ffnn_6_6_digits_640", "data=breast_cancer"])
    assert list(cfg.tasks) == ["ffnn_6_6_digits_640"]
    assert cfg.tasks.ffnn_6_6_digits_640.data._target_.endswith("breast_cancer")
    assert list(cfg.command.overrides) == ["task=ffnn_6_6_digits_640", "data=breast_cancer"]


def test_long_forms_work_as_hydra_has_them() -> None:
    own = "tasks.ffnn_8_digits_200.data"
    cfg = load_config(FIG6, ["preset=smoke", "seeds=[1,2,3]", f"{own}.num_train=70", f"data@{own}=breast_cancer"])
    assert list(cfg.seeds) == [1, 2, 3]
    assert cfg.tasks.ffnn_8_digits_200.data.num_train == 70


def test_what_stands_beside_the_tasks_is_left_as_typed() -> None:
    cfg = load_config(all_targets()["ngd/fig2"], ["training.num_epochs=3", "data.num_train=50"])
    assert cfg.training.num_epochs == 3
    assert {task.data.num_train for task in cfg.tasks.values()} == {50}
    assert not any("training" in task for task in cfg.tasks.values())


@pytest.mark.parametrize(
    ("target", "override", "text"),
    [
        (FIG6, "data=mnits", "unknown choice 'mnits'.*did you mean 'mnist'"),
        (FIG6, "task=ffnn_32_digits", "no task 'ffnn_32_digits' here; did you mean 'ffnn_32_32_digits'"),
        (FIG6, "data=mnist,digits", "sweeps over 2 tasks at once .*add task=NAME"),
        (FIG6, "data.num_trian=3", "unknown key 'tasks.ffnn_32_32_digits.data.num_trian'.*did you mean"),
        (FIG6, "tasks.ffnn_6_6.data.num_train=3", "unknown key 'tasks.ffnn_6_6"),
        (FIG6, "modle.activation=gelu", "unknown key 'modle.activation'; did you mean 'model.activation'?"),
        (TAB6, "~task@tasks.mlp_4_diabetes_60", "leaves no task"),
        (
            TAB6,
            "~tasks.mlp_4_diabetes_60.model",
            "without model, and keeps its data, .*: delete .*'~tasks.mlp_4_d",
        ),
        # The preset's own keys of its data and model are left, which are none.
        (THM1, "~task@tasks.mlp_2_tanh_mnist_6000", "without data and model, and keeps its data, model, "),
        (TAB6, "~tasks", "leaves no task"),
        (TAB6, "+task=mlp_4_diabetes_60", "task@tasks.mlp_4_diabetes_60, tracker. A task is added by "),
        (TAB6, "+task@tasks.mlp_4_diabetes_60=mlp_4_digits_100", "is chosen already: change it without"),
        (TAB6, "+tasks.mlp_4_diabetes_60.foo=1", "unknown key 'tasks.mlp_4_diabetes_60.foo'"),
    ],
)
def test_mistyped_forms_and_half_tasks_are_refused(target: str, override: str, text: str) -> None:
    preset = ["preset=smoke"] if target == TAB6 else ["preset=laptop"] if target == THM1 else []
    refuses(text, load_config, target, [*preset, override], error=ConfigurationError)


ADDED = "+task@tasks.mlp_16_16_digits_300=mlp_16_16_digits_300"


def test_a_task_is_added_beside_those_of_the_preset() -> None:
    cfg = load_config(TAB6, ["preset=smoke", ADDED, "+tasks.mlp_16_16_digits_300.dtype=float64"])
    assert list(cfg.tasks) == ["mlp_4_diabetes_60", "mlp_16_16_digits_300"]
    assert cfg.tasks.mlp_16_16_digits_300.data._target_.endswith("digits")
    assert cfg.tasks.mlp_16_16_digits_300.dtype == "float64"


def test_short_forms_beside_a_sweep_and_beside_a_mistyped_key() -> None:
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        given = expand("rank1/fisher", ["preset=smoke", "seed=0,1", "num_seeds=2,3", "data.num_train=50"])
        assert given["tasks.mlp_2_diabetes_20.data.num_train=50"] == "data.num_train=50"
        assert "seed=0,1" in given
        refused, mistyped = partial(refuses, error=ConfigurationError), ["model=lenet", "solver.damping=0.1"]
        refused(r"unknown key 'solver.damping'; did you mean 'damping'", expand, "lissa/fig1", mistyped)
        swept = checked_config, "lissa/fig1", ["damping_ratio=0.1,-1e-3"]
        refused("damping_ratio must be at least 0", *swept, multirun=True)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("training.lr=-3", "training.lr=-3 is out of range: lr must be greater than 0"),
        ("data.num_train=0", "num_train must be a whole number, at least 1"),
        ("tasks.mlp_64_64_digits.model.hidden_sizes=[16,0]", "hidden_sizes must be a whole number, at least 1"),
        ("tasks.mlp_64_64_digits.training.batch_size=-1", "batch_size must be a whole number, at least 1"),
        ("tasks.mlp_64_64_digits.training={lr: -1}", "lr must be greater than 0"),
        ("num_points=abc", "num_points must be a whole number, at least 1"),
        ("num_points=2.5", "num_points must be a whole number, at least 1"),
        ("training.momentum=2", "momentum must be at least 0 and below 1"),
        ("damping=-.5", "damping must be at least 0"),
        ("damping_ratio=inf", "damping_ratio must be at least 0"),
        ("measured.safety=0", "safety must be greater than 0"),
        ("force=maybe", "force must be true or false"),
        ("seed=abc", "seed=abc is no seed: it must be a whole number"),
        ("seed=1.5", "seed=1.5 is no seed"),
        ("seed=null", "seed=null is no seed"),
        ("seed=true", "seed=true is no seed"),
        ("device=gpu", "device=gpu is no device: it must be auto, cpu, cuda"),
        ("tasks=mlp", "named by task=NAME"),
        ("trainig.lr=1", r"unknown key 'trainig.lr'; did you mean 'training.lr'\?"),  # of every task
        ("results=/tmp/mine", "results=/tmp/mine: results holds root; set one of these, as results.root=..."),
    ],
)
def test_numbers_that_no_target_can_work_with_are_refused(override: str, text: str) -> None:
    refuses(text, load_config, FIG1, [override], error=ConfigurationError)


def test_other_numbers_and_what_is_no_number_are_left_alone() -> None:
    others = "data.num_train=null", "rates.low=${rates.high}", "llc.num_burnin_steps=0", "after.llc_epochs=[1]"
    for override in others:
        load_config(FIG6, [override])
    load_config(all_targets()["lissa/fig3"], ["preset=paper", "data.column=content"])
    cfg = load_config(FIG1, ["training.lr=1e-9"])
    assert {task.training.lr for task in cfg.tasks.values()} == {1e-9}


def test_a_refusal_comes_before_torch_is_loaded() -> None:
    code = (
        "import sys; from experiments.__main__ import main\n"
        "try: main(['run', 'lissa-fig1', 'num_points=0'])\n"
        "except SystemExit as end: assert end.code == 2, end.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        0,
        "error: num_points=0 is out of range: num_points must be a whole number, at least 1.\n",
    )
