"""The command line of a target: configs, names that follow from what was typed, and failures from outside."""

from __future__ import annotations

import errno
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import hydra
import pytest
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError

from curvlab.lab import all_targets, load_config
from curvlab.lab.data.download import damaged, not_found
from curvlab.lab.runs import configuration
from curvlab.lab.runs.configuration import Command, Entry, explanation, unwritable
from curvlab.lab.runs.overrides import ConfigurationError, checked_config, expand
from tests.refusals import refuses
from tests.warm import Warm

Demo = Callable[..., subprocess.CompletedProcess[str]]


def test_default_preset_is_embedded_and_readable(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = configuration.load_config(entry)
    assert (cfg.preset, cfg.num_train, cfg.data.name, cfg.damping) == ("embedded", 5, "digits", 1.0)
    assert (cfg.tracker.name, cfg.tracker.mode) == ("wandb", "offline")
    assert (cfg.store.root, cfg.results.root) == (".cache/store", "results")
    assert "hydra" not in cfg
    monkeypatch.setenv("CURVLAB_STORE", "elsewhere")
    assert configuration.load_config(entry).store.root == "elsewhere"


def test_data_and_values_override_the_preset(entry: Entry) -> None:
    cfg = configuration.load_config(entry, ["preset=laptop", "data=digits", "num_train=3"])
    assert (cfg.preset, cfg.data.name, cfg.num_train) == ("laptop", "digits", 3)
    assert configuration.load_config(entry, ["preset=laptop"]).data.name == "mnist"
    assert list(cfg.command.overrides) == ["preset=laptop", "data=digits", "num_train=3"]


@pytest.mark.parametrize(
    ("overrides", "texts"),
    [
        (["sovler.rtol=1"], ["key 'sovler.rtol'", "did you mean 'solver.rtol'", "Keys: .*damping.*solver"]),
        (["solver.rtoll=1"], ["key 'solver.rtoll'", "did you mean 'solver.rtol'", "'solver': .*max_steps"]),
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
        (["tracker=wandbb"], ["did you mean 'wandb'", "none, trackio, wandb"]),
        (["preset=paper"], ["unknown choice 'paper' for 'toy/fig1'", "embedded, laptop, smoke"]),
        (["model=mlp"], ["toy/fig1 has no 'model'", "among: data, preset, solver, sweep, tracker."]),
        (["+model=mlp"], ["toy/fig1 has no 'model' to choose"]),
        (["damping=["], [r"cannot read 'damping=\['", "key=value"]),
        (["damping"], ["cannot read 'damping'", "key=value"]),
        (["preset=smoke,laptop"], ["Ambiguous value for argument 'preset=smoke,laptop'"]),
    ],
)
def test_wrong_override_is_refused_with_what_was_meant(entry, overrides: list[str], texts: list[str]) -> None:
    with pytest.raises(ConfigurationError) as refused:
        configuration.load_config(entry, overrides)
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
    configuration.load_config(entry, overrides)


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


def test_mistyped_override_exits_with_status_2_and_help_and_cfg_work(demo: Demo) -> None:
    assert "Powered by Hydra" in demo("--help").stdout
    shown = demo("--cfg", "job", "preset=smoke")
    assert shown.returncode == 0
    assert "num_train: 2" in shown.stdout
    assert demo("--cfg", "job", "prset=smoke").returncode == 2
    done = demo("preset=labtop")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: unknown choice 'labtop' for 'preset'; did you mean 'laptop'?\n"
        "Choices of 'preset': embedded, laptop, paper, smoke.\n"
    )


NAME = "lissa-fig1"
NEUTRAL = (
    "preset=laptop", "force=true", "progress=false", "device=cuda", "tracker=none", "tracker.mode=online",
    "store.root=/a", "results.root=/b", "data.root=/c",
    "hydra.verbose=true", "hydra/launcher=basic", "+hydra.job.env_set.X=1",
)  # fmt: skip


def folder(*overrides: str) -> str:
    return Command(NAME, overrides).folder_name("laptop")


def test_neutral_overrides_keep_the_published_folder_and_others_get_their_own() -> None:
    assert folder(*NEUTRAL) == "laptop"
    assert folder("preset=laptop", "model=lenet", "damping=0.1") == "laptop+damping=0.1,model=lenet"
    assert folder("damping=0.1", "model=lenet") == folder("model=lenet", "damping=0.3", "damping=0.1")
    assert folder("seed=1") == "laptop+seed=1"
    assert folder("data.rooted=1") == "laptop+data.rooted=1"


def test_unsafe_characters_and_long_names_leave_but_names_stay_distinct() -> None:
    for first in ("widths=[1,2]", "name=a/b", "name='../../x'"):
        assert re.fullmatch(r"[a-zA-Z0-9_.,=~+-]*", cleaned := folder(first))
        assert cleaned != folder(first.translate(str.maketrans("[]/'", "____")))
    names = {folder(*(f"group{k}.setting={k}" for k in range(12)), f"last={x}") for x in range(3)}
    assert len(names) == 3
    assert max(map(len, names)) <= 80


def test_lines_rerun_in_a_shell() -> None:
    assert Command(NAME, NEUTRAL).make_line("laptop") == "make lissa-fig1 PRESET=laptop"
    assert Command(NAME, ("device=cuda", "seed=0", "tracker=none")).label == ("seed=0", "device=cuda")
    line = Command(NAME, ("model=lenet", "solver.damping=0.1")).make_line("laptop")
    assert line == 'make lissa-fig1 PRESET=laptop ARGS="model=lenet solver.damping=0.1"'
    tricky = ("name='a $b'", 'x="q"')
    words = shlex.split(Command(NAME, tricky).make_line("laptop"))
    arguments = words[-1].removeprefix("ARGS=").replace("$$", "$")  # what make hands to its shell
    assert tuple(shlex.split(arguments)) == tuple(sorted(tricky))
    line = Command(NAME, ("preset=laptop", "model=lenet", "tracker=none")).python_line("laptop")
    assert line == "python -m experiments run lissa-fig1 preset=laptop model=lenet"
    assert Command().python_line("laptop") == ""


def test_command_travels_in_the_config() -> None:
    cfg = OmegaConf.create({"seed": 0})
    OmegaConf.set_struct(cfg, True)
    assert Command.of(cfg) == Command()
    command = Command(NAME, ("seed=1",))
    assert Command.of(command.attach(cfg)) == command


@pytest.fixture
def roots(tmp_path: Path) -> DictConfig:
    return OmegaConf.create(
        {name: {"root": str(tmp_path / name)} for name in ("results", "store")}
        | {"tracker": {"folder": str(tmp_path / "outputs")}}
    )


@pytest.mark.parametrize("key", ["results.root", "store.root", "tracker.folder"])
def test_a_file_in_the_way_is_named_before_anything_runs(roots: DictConfig, tmp_path: Path, key: str) -> None:
    assert unwritable(roots) is None  # they can be made
    (tmp_path / "file").write_text("")
    OmegaConf.update(roots, key, str(tmp_path / "file" / "below"))
    problem = str(unwritable(roots))
    assert f"{key}=" in problem
    assert "file' is no folder" in problem
    assert f"{key}=FOLDER" in problem


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(roots: DictConfig, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    roots.results.root = str(closed / "results")
    assert "no permission" in str(unwritable(roots))


def test_missing_and_damaged_data_show_through_what_wraps_them(roots: DictConfig) -> None:
    for cause in (not_found("mnist", Path("data/MNIST")), damaged(Path("data/x"), "truncated")):
        wrapped = RuntimeError("Error in call to target 'curvlab.lab.data.images.load_mnist'")
        wrapped.__cause__ = cause
        assert explanation(wrapped, roots) == str(cause)


def test_a_key_that_an_override_took_away_is_named(roots: DictConfig) -> None:
    error = ConfigKeyError("Missing key seeds")
    error.full_key = "seeds"
    assert explanation(error, roots) is None
    line = str(explanation(error, Command("toy-fig1", ("seed=1", "~seeds")).attach(roots)))
    assert line == "this target reads the key 'seeds', which a task lacks after ~seeds."


FULL = errno.ENOSPC, os.strerror(errno.ENOSPC)
ENFORCE = "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you"
MEMORY = r"^memory ran out \({}\)\. Raise the limit.*smaller preset or batch_size.*are kept"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(*FULL), "MiB free; No space left on device.*results.root=FOLDER.*are kept"),  # as file.write does
        (OSError(*FULL, "from", None, "to"), r"\('to'; No space left"),  # as shutil.copy raises it
        (MemoryError(), MEMORY.format("MemoryError")),
        (RuntimeError(ENFORCE), MEMORY.format(re.escape(ENFORCE))),
        (ImportError("x.so: failed to map segment"), MEMORY.format("x.so: failed to map segment")),
        (PermissionError(errno.EACCES, "Permission denied", "STORE/unit/x.pt"), "^store.root=.*CURVLAB_STORE"),
    ],
)
def test_a_full_disk_and_memory_and_a_refused_write_are_said_with_what_to_change(
    roots: DictConfig, error: Exception, text: str
) -> None:
    if isinstance(error, PermissionError):  # the root that it belongs to is named
        error.filename = error.filename.replace("STORE", roots.store.root)
    line = str(explanation(error, roots))
    assert re.search(text, line), line
    assert "\n" not in line


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a mistake in the code"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "/elsewhere/file"),
        PermissionError(errno.EACCES, "Permission denied", "/elsewhere/file"),
    ],
)
def test_other_errors_keep_their_traceback(roots: DictConfig, error: Exception) -> None:
    assert explanation(error, roots) is None


def test_the_command_line_ends_with_one_line_and_keeps_what_is_done(checkout: Path, warm: Warm) -> None:
    (checkout / "file").write_text("")
    script = checkout / "experiments" / "toy" / "fig1.py"
    for status, folder in ((1, "results.root=file/results"), (2, "hydra.run.dir=file/outputs")):
        done = warm.run(script, "preset=smoke", "tracker=none", folder, cwd=checkout)
        assert done.returncode == status
        assert done.stderr.startswith(f"error: {folder} cannot be written")
        assert "Traceback" not in done.stderr
        assert "HYDRA" not in done.stderr
        assert done.stderr.count("\n") == 1


# ------------------------------------------------------------------------------------------------------- overrides
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
