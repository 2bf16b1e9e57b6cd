"""What holds of all public calls: all kinds of models and data by one door; seeds, bars, going on after a kill."""

from __future__ import annotations

import importlib
import inspect
import io
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from curvlab import progress as bars
from curvlab.iterate import Checkpoint
from curvlab.problem.memory import MemoryWarning
from curvlab.seeding import generator_of
from tests.conformance import calls
from tests.conformance.calls import CALLS, OF_OPERATORS, SEED, Call, network
from tests.conformance.doors import BEGIN, END, FORMS, FUNCTIONS, KINDS, LIBRARY, MODELS, REFUSED, case_of, table
from tests.models import Limited
from tests.refusals import refuses

# --- One door: every function takes every kind of model and of data, or says what to change; see `doors`
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # few steps: nothing converges
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.mark.parametrize("model", MODELS)
def test_every_function_takes_every_model(model: str) -> None:
    for name, function in FUNCTIONS.items():
        if (model, name) in REFUSED:
            refuses(re.escape(REFUSED[model, name]), function, case_of(model), error=(ValueError, TypeError))
        else:
            found = of_tensors(model, name)
            assert found.numel(), name
            assert bool(torch.isfinite(found).all()), name


@cache
def of_tensors(model: str, name: str) -> Tensor:
    return FUNCTIONS[name](case_of(model))


FULL_PRECISION = ("choose_sgld_settings", "estimate_llc", "train and evaluate, NGD")


@pytest.mark.parametrize("model", ["MLP", "own loss, convex"])
def test_every_function_takes_half_precision_or_says_what_to_do(model: str) -> None:
    case = case_of(model, half)
    half_case = replace(case, model=case.model.bfloat16(), test=[half(case.test[0])])
    for name, function in FUNCTIONS.items():
        text = "float32 or float64" if name in FULL_PRECISION else REFUSED.get((model, name))
        if text is None:
            assert bool(torch.isfinite(function(half_case)).all()), name
        else:
            refuses(re.escape(text), function, half_case, error=(ValueError, TypeError))


def half(data: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return tuple(part.bfloat16() if part.is_floating_point() else part for part in data)


# A model of Hugging Face reads its labels itself; in one function of each of the two ways to the data.
OF_HUGGING_FACE = ("top_eigenvalues, hutchinson_trace of GaussNewtonOperator", "train and evaluate, NGD")


def covered(form: str, function: str, kind: str) -> bool:
    """Whether a function reads a kind of data in this form: each pair of them in one of the forms that have it."""
    forms = [name for name, (_, kinds) in FORMS.items() if kind in kinds]
    place = list(FUNCTIONS).index(function) + list(KINDS).index(kind)
    return forms[place % len(forms)] == form


@pytest.mark.parametrize("form", FORMS)
def test_every_function_gives_the_same_for_every_kind_of_data(form: str) -> None:
    model, kinds = FORMS[form]
    pairs = [(name, kind) for name in FUNCTIONS for kind in kinds[1:] if covered(form, name, kind)]
    assert {name for name, _ in pairs} == set(FUNCTIONS)
    assert {kind for _, kind in pairs} == set(kinds[1:])
    check_kinds(model, pairs)


def test_a_model_that_reads_its_labels_gives_the_same_for_every_kind_of_data() -> None:
    _, kinds = FORMS["mapping with labels inside"]
    check_kinds("GPT-2", [(name, kind) for name in OF_HUGGING_FACE for kind in kinds[1:]])


def check_kinds(model: str, pairs: list[tuple[str, str]]) -> None:
    for name, kind in pairs:
        found, expected = FUNCTIONS[name](case_of(model, KINDS[kind])), of_tensors(model, name)
        assert_close(found, expected, rtol=1e-3, atol=1e-5, msg=lambda text, at=(name, kind): f"{at}: {text}")


def test_the_tables_in_the_documents_are_these() -> None:
    text = LIBRARY.read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0].strip() == table(), "run python -m tests.conformance.doors"


# --- What holds of all public calls: a `Problem` for model, loss and data, seeds, bars, going on after a kill
ALL = CALLS | OF_OPERATORS
PACKAGES = (
    "problem",
    "curvature",
    "spectrum",
    "solvers",
    "training",
    "influence",
    "influence.retraining",
    "sampling",
)


# ------------------------------------------------------------------------------------ what is public
def public(*packages: str) -> dict[str, Any]:
    """Return functions and classes by name, but for errors and protocols."""
    modules = [importlib.import_module(f"curvlab.{package}") for package in packages]
    found = {name: getattr(module, name) for module in modules for name in module.__all__}
    classes = (type, type(lambda: None))
    return {n: f for n, f in found.items() if isinstance(f, classes) and not _is_other(f)}


def _is_other(found: Any) -> bool:
    return isinstance(found, type) and (issubclass(found, BaseException) or getattr(found, "_is_protocol", False))


def arguments(found: Any) -> set[str]:
    return set(inspect.signature(found).parameters)


# What has model and loss, but no door of three: why.
NO_PROBLEM = {
    "DataOperator": "the base of operators, abstract",
    "Learner": "what a step of training moves: its data comes batch by batch",
    "ShardedGaussNewtonOperator": "the model's parameters lie in parts on many ranks, which no Problem opens",
    "ShardedHessianOperator": "likewise",
}


def test_what_takes_model_loss_and_data_takes_a_problem_and_is_in_the_table() -> None:
    found = {n: f for n, f in public(*PACKAGES, "optim", "parallel").items() if {"model", "loss"} <= arguments(f)}
    for name in found.keys() - NO_PROBLEM.keys():
        first = next(iter(inspect.signature(found[name]).parameters.values()))
        assert "Problem" in str(first.annotation), name
    assert found.keys() - NO_PROBLEM.keys() <= {call.function.__name__ for call in CALLS.values()}
    assert NO_PROBLEM.keys() <= found.keys()


# Numbers from numbers, one step, one example, or what another call does: no bar.
SHORT = {
    *("freeze", "only_parameters", "output_loss", "stack"),
    *("certified_constant", "example_importance", "has_exact_traces", "importance_probabilities"),
    *("default_solver", "lissa_hyperparameters"),
    *("closure_step", "curvature_step", "gradient_step", "shared_curvature_step"),
    *("cosine", "cosine_after_warmup", "sampled_label_loss", "shuffled_batches", "weighted_gradient"),
    *("agreement", "confident_learning_scores", "corrupt_labels", "cosines", "detection_curve", "margins"),
    *("lds", "load_bank", "median_rms", "random_halves"),
    *("removal_weights", "subset_weights"),
    "influence_scores",  # passes all settings on to `influence`
    *("cold_optimum", "warm_optimum", "proximal_warm_optimum", "proximal_bregman_warm_optimum"),
    *("linearised_proximal_bregman_warm_optimum", "influence_estimate"),  # the minimizer's, the solver's
    *("curvature_operator", "two_stage_optimum"),
    *("default_nbeta", "drift", "effective_sample_size", "split_rhat"),
    *("descent_to_minimum", "measure_ends"),  # L-BFGS of sixty steps; ten products at each end
}
# What has a bar, but neither checkpoint nor callback: why.
ONE_PIECE = {
    **dict.fromkeys(("evaluate", "mean_gradient", "per_example_gradients"), "one pass over the data"),
    **dict.fromkeys(("directional_derivatives", "exact_traces", "output_curvatures"), "one pass over the data"),
    **dict.fromkeys(("loss_response", "output_gaps", "ensemble_measurements"), "one pass for each network"),
    "sampled_traces": "a few passes over the data",
    "linear_datamodelling_score": "one pass over the retrainings, which are the caller's",
    **dict.fromkeys(("measure_recipe", "measure_constant"), "the products of a few dozen batches"),
    "prepare_influence": "one set-up, which `PreparedInfluence.save` keeps",
    "proximal_bregman_response": "its optimizer=... has them",
}


def test_what_may_take_long_has_progress_checkpoint_and_callback() -> None:
    functions = {n: f for n, f in public(*PACKAGES).items() if inspect.isfunction(f)}
    assert {n for n, f in functions.items() if "progress" not in arguments(f)} == SHORT
    silent = {n for n, f in functions.items() if n not in SHORT and not _default(f, "progress")}
    assert silent == {"run_chains"}
    lasting = {"checkpoint", "callback"}
    assert {n for n, f in functions.items() if n not in SHORT and not lasting <= arguments(f)} == ONE_PIECE.keys()
    solvers = {n: f for n, f in public(*PACKAGES).items() if isinstance(f, type) and "max_steps" in arguments(f)}
    assert all({"progress", *lasting} <= arguments(solver) for solver in solvers.values())


def _default(function: Any, name: str) -> Any:
    return inspect.signature(function).parameters[name].default


# ------------------------------------------------------------------------------------ what they do
def assert_same(found: Any, expected: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    if isinstance(expected, Tensor | float):
        assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, part in expected.items():
            assert_same(found[name], part, rtol=rtol, atol=atol)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, rtol=rtol, atol=atol)
    else:
        assert found == expected


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(call: Call, **others: Any) -> tuple[Any, str]:
    """Return the numbers of a call, and what it shows on a terminal."""
    terminal = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bars, "_SECONDS_BEFORE_BAR", 0.0)
        patch.setattr(sys, "stderr", terminal)
        return call(**others), terminal.getvalue()


@cache
def plain(name: str) -> tuple[Any, list[int], str]:
    """Return the numbers of a call without a bar, the steps that a callback saw, and what is shown."""
    seen: list[int] = []
    found, shown = run(ALL[name], progress=False, callback=lambda state: seen.append(state.num_steps))
    return found, seen, shown


@pytest.mark.parametrize("name", ALL)
def test_a_problem_a_generator_and_a_bar_give_the_same_numbers(name: str) -> None:
    """A problem for model, loss and data, and inference mode; a generator for its seed; a bar, or none."""
    call, (expected, _, silence) = ALL[name], plain(name)
    generator = torch.Generator().manual_seed(SEED)
    found, shown = run(call, opened=name in CALLS, generator=generator, progress=True)
    assert_same(found, expected)
    if call.takes("progress"):
        assert silence == ""
        assert "it/s" in shown or "step" in shown


# Small systems are solved without anything that draws.
SOLVED = {"influence", "prepare_influence", "self_influence", "preconditioned_influence", "similarities"}


@pytest.mark.parametrize("name", [name for name, call in ALL.items() if call.takes("generator")])
def test_another_seed_gives_other_numbers(name: str) -> None:
    with nullcontext() if name in SOLVED else pytest.raises(AssertionError):
        assert_same(ALL[name](generator=SEED + 1), plain(name)[0])


@pytest.mark.parametrize("seed", ["0", 1.0, True])
def test_what_is_neither_is_refused(seed: Any) -> None:
    for call in (generator_of, lambda seed: OF_OPERATORS["hutchinson_trace"](generator=seed)):
        refuses(r"torch\.Generator or a whole number as seed", call, seed, error=TypeError)


def test_every_bar_of_work_beyond_ten_seconds_says_how_long_it_will_take(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = iter(range(0, 10**9, 5))
    monkeypatch.setattr(bars.time, "monotonic", lambda: float(next(clock)))  # five seconds a look
    passes = {
        "gradient": "mean_gradient",
        "gradients": "per_example_gradients",
        "derivatives": "directional_derivatives",
        "pilots, at most 8": "choose_sgld_settings",
    }
    works: dict[str, Callable[[], Any]] = {
        name: partial(CALLS[call], progress=True, batch_size=4 if "sgld" in call else 1)
        for name, call in passes.items()
    }
    searches = {
        "trace": "hutchinson_trace",
        "eigenvalues, at most 4 products": "top_eigenvalues",
        "Hutch[+][+]": "hutchpp_trace",
        "sketch": "sketch_eigenvalues",
    }
    works |= {name: partial(OF_OPERATORS[call], progress=True) for name, call in searches.items()}
    works["walk"] = lambda: list(bars.progress_bar("walk", range(50)))
    with caplog.at_level("INFO", logger="curvlab"):
        for name, work in works.items():
            caplog.clear()
            work()
            assert [r for r in caplog.messages if re.match(rf"{name}: about \d", r)], name
        caplog.clear()
        CALLS["mean_gradient"](progress=False, batch_size=1)
    assert not caplog.messages


ROOM = 6  # examples at a time, which no batch of a training exceeds
IN_STEPS = {"Replay", "adam_times", "proximal_bregman_response", "train"}
IN_STEPS |= {name for name in CALLS if name.startswith("unrolled")}
# What is not the same number when passes are cut: why.
UNCUT = {
    "descent_to_minimum": "a search by the gradients of all examples at once",
    "self_influence, probes": "each pass draws its own probes: see test_self_influence",
}


@pytest.mark.parametrize("name", [name for name in CALLS if name not in UNCUT])
def test_where_memory_runs_out_or_is_given_passes_are_cut_to_the_same_numbers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, (expected, _, _) = CALLS[name], plain(name)
    if call.takes("memory_budget") and name != "ProximalBregmanObjective":  # whose curvature alone is cut
        with pytest.warns(MemoryWarning, match="that are given: a pass takes"):
            assert_same(call(memory_budget=2**9), expected, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(calls, "network", lambda: Limited(*network(), most=ROOM))
    with nullcontext() if name in IN_STEPS else pytest.warns(MemoryWarning, match="a pass now takes 6 examples"):
        found = call()
    assert_same(found, expected, rtol=1e-5, atol=1e-6)


class Killed(BaseException):
    """What a kill looks like from inside."""


# Solvers and estimates of an operator: see test_solvers_conformance, where one is not.
RESUMED = [name for name, call in CALLS.items() if call.takes("checkpoint")] + ["mean_eigenvalue"]


@pytest.mark.parametrize("name", RESUMED)
def test_a_killed_call_goes_on_to_the_same_numbers(name: str, tmp_path: Path) -> None:
    call: Call = ALL[name]
    expected, seen, _ = plain(name)
    killed_at = max(1, max(seen) // 2)

    def kill(state: Any) -> None:
        if state.num_steps > killed_at:
            raise Killed

    place = tmp_path / "unfinished"
    with pytest.raises(Killed):
        call(callback=kill, checkpoint=Checkpoint(place, every=1))
    again: list[int] = []
    found = call(callback=lambda state: again.append(state.num_steps), checkpoint=Checkpoint(place, every=1))
    assert_same(found, expected)
    assert min(again) > 1, "it began anew"
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "its files stay"
