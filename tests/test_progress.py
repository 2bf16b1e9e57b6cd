"""Every public call that may take long has a bar, and progress=False silences it and all that it calls."""

from __future__ import annotations

import importlib
import inspect
import io
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from curvlab import curvature, influence, problem, sampling, solvers, spectrum, training
from curvlab import progress as bars
from curvlab.influence import retraining
from curvlab.linalg import identity

# What has no bar: numbers from numbers, one step, one example, or what is told by the argument that it is given.
SHORT = {
    "problem": {"freeze", "only_parameters", "output_loss", "stack"},
    "curvature": {"certified_constant", "example_importance", "importance_probabilities"},
    "solvers": {"default_solver", "lissa_hyperparameters"},
    "training": {
        *("closure_step", "curvature_step", "gradient_step", "shared_curvature_step"),
        *("cosine", "cosine_after_warmup", "sampled_label_loss", "shuffled_batches", "weighted_gradient"),
    },
    "influence": {
        *("agreement", "confident_learning_scores", "corrupt_labels", "cosines", "detection_curve", "margins"),
        *(
            "lds",
            "linear_datamodelling_score",
            "load_bank",
            "median_rms",
            "random_halves",
            "removal_weights",
            "subset_weights",
        ),
        "influence_scores",  # passes all settings on to `influence`
    },
    "influence.retraining": {
        *("cold_optimum", "warm_optimum", "proximal_warm_optimum", "proximal_bregman_warm_optimum"),
        *("linearised_proximal_bregman_warm_optimum", "influence_estimate"),  # the minimizer's, the solver's
        *("curvature_operator", "two_stage_optimum"),
    },
    "spectrum": set(),
    "sampling": {
        *("default_nbeta", "drift", "effective_sample_size", "split_rhat"),
        *("descent_to_minimum", "measure_ends"),  # L-BFGS of sixty steps; ten products at each end
    },
}


@pytest.mark.parametrize("name", SHORT)
def test_what_may_take_long_has_a_bar_that_can_be_turned_off(name: str) -> None:
    module = importlib.import_module(f"curvlab.{name}")
    functions = {n: getattr(module, n) for n in module.__all__ if inspect.isfunction(getattr(module, n))}
    without = {n for n, f in functions.items() if "progress" not in inspect.signature(f).parameters}
    assert without <= SHORT[name]
    silent = [
        n
        for n, f in functions.items()
        if n not in without and not inspect.signature(f).parameters["progress"].default
    ]
    assert silent in ([], ["run_chains"])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def task() -> tuple[nn.Module, nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double().eval()
    return model, nn.CrossEntropyLoss(), (torch.randn(12, 4).double(), torch.arange(12) % 2)


def op() -> Any:
    return curvature.GaussNewtonOperator(*task())


def recorded() -> tuple[Any, ...]:
    model, loss, data = task()
    settings: dict[str, Any] = {"num_epochs": 2, "batch_size": 6, "lr": 0.1, "momentum": 0.0, "generator": 0}
    history = training.train(model, loss, data, **settings, record=True, progress=False)
    return model, loss, data, history


def with_run(function: Callable[..., Any], *others: Any, **settings: Any) -> Callable[[bool], Any]:
    model, loss, data, history = recorded()
    return lambda progress: function(model, loss, data, *others, run=history, progress=progress, **settings)


def solved(solver: Any) -> Callable[[bool], Any]:
    b = torch.ones(op().shape[0], 2, dtype=torch.float64)
    return lambda progress: solver(progress=progress).solve(op() + 0.1 * identity, b, generator=0)


DATA = task()[2]
PGD = retraining.ProximalSGD(0.1, 4, 3)
CALLS: dict[str, Callable[[bool], Any]] = {
    "influence": lambda on: influence.influence(*task(), DATA, damping=0.1, progress=on),
    "influence_scores": lambda on: influence.influence_scores(*task(), DATA, damping=0.1, progress=on),
    "prepare_influence": lambda on: influence.prepare_influence(*task(), damping=0.1, progress=on).scores(
        DATA, progress=on
    ),
    "self_influence": lambda on: influence.self_influence(*task(), damping=0.1, progress=on),
    "unrolled_response": with_run(influence.unrolled_response, DATA),
    "segment_response": with_run(influence.segment_response, DATA, num_segments=1),
    "explain_gap": with_run(influence.explain_gap, [3]),
    "per_example_gradients": lambda on: influence.per_example_gradients(*task(), progress=on),
    "directional_derivatives": lambda on: influence.directional_derivatives(
        *task(), torch.ones(23, 1).double(), progress=on
    ),
    "similarities": lambda on: influence.similarities(
        *task(), op() + 0.1 * identity, solver=solvers.BlockConjugateGradient(), progress=on
    ),
    "proximal_bregman_response": lambda on: influence.proximal_bregman_response(
        *task(), [1], damping=0.1, epsilon=1e-6, optimizer=PGD, progress=on
    ),
    "loss_response": lambda on: influence.loss_response(
        *task(), torch.ones(23, 1).double(), epsilon=1e-3, progress=on
    ),
    "train": lambda on: training.train(*task(), num_epochs=1, batch_size=4, lr=0.1, generator=0, progress=on),
    "evaluate": lambda on: training.evaluate(*task(), progress=on),
    "mean_gradient": lambda on: problem.mean_gradient(*task(), progress=on),
    "sampled_traces": lambda on: curvature.sampled_traces(op(), progress=on),
    "exact_traces": lambda on: curvature.exact_traces(op(), progress=on),
    "output_curvatures": lambda on: curvature.output_curvatures(op(), progress=on),
    "top_eigenvalues": lambda on: spectrum.top_eigenvalues(op(), generator=0, progress=on),
    "hutchinson_trace": lambda on: spectrum.hutchinson_trace(op(), num_matvecs=3, generator=0, progress=on),
    "Lissa.auto": lambda on: solvers.Lissa.auto(op(), 0.1, sampling="uniform", generator=0, progress=on),
    "measure_importance_recipe": lambda on: solvers.measure_importance_recipe(op(), 0.1, generator=0, progress=on),
    "Lissa": solved(lambda **s: solvers.Lissa(0.1, 4, 5, **s)),
    "ConjugateGradient": solved(solvers.ConjugateGradient),
    "BlockConjugateGradient": solved(
        lambda **s: solvers.BlockConjugateGradient(preconditioner=solvers.Rows(), **s)
    ),
    "choose_sgld_settings": lambda on: sampling.choose_sgld_settings(
        *task(), batch_size=4, num_burnin_steps=20, num_chains=2, num_steps=4, generator=0, progress=on
    ),
    "estimate_llc": lambda on: sampling.estimate_llc(
        *task(),
        step_size=1e-4,
        localization=10.0,
        batch_size=4,
        num_chains=2,
        num_draws=20,
        num_burnin_steps=5,
        generator=0,
        progress=on,
    ),
}


@pytest.mark.filterwarnings("ignore")
def test_every_bar_of_work_beyond_ten_seconds_says_how_long_it_will_take(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = iter(range(0, 10**9, 5))
    monkeypatch.setattr(bars.time, "monotonic", lambda: float(next(clock)))  # five seconds a look
    directions = torch.ones(op().shape[0], 1, dtype=torch.float64)
    works: dict[str, Callable[[], Any]] = {
        "walk": lambda: list(bars.progress_bar("walk", range(50))),
        "gradient": lambda: problem.mean_gradient(*task(), batch_size=1),
        "gradients": lambda: influence.per_example_gradients(*task(), batch_size=1),
        "derivatives": lambda: influence.directional_derivatives(*task(), directions, batch_size=1),
        "pilots, at most 8": lambda: CALLS["choose_sgld_settings"](True),
    }
    with caplog.at_level("INFO", logger="curvlab"):
        for name, work in works.items():
            caplog.clear()
            work()
            assert [r for r in caplog.messages if re.match(rf"{name}: about \d", r)], name
        caplog.clear()
        problem.mean_gradient(*task(), batch_size=1, progress=False)
    assert not caplog.messages


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_bar_is_shown_and_false_silences_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars, "_SECONDS_BEFORE_BAR", 0.0)
    shown = {}
    for on in (True, False):
        terminal = Terminal()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", terminal)
            CALLS[name](on)
        shown[on] = terminal.getvalue()
    assert "it/s" in shown[True] or "step" in shown[True]
    assert shown[False] == ""
