"""Public calls of model, loss and data, or of a `Problem`, and of an operator: one table for what holds of all."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvlab import curvature, influence, optim, problem, sampling, solvers, spectrum, training
from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator
from curvlab.influence import retraining
from curvlab.linalg import LinearOperator, identity
from curvlab.problem import Problem
from curvlab.progress import can_be_silent
from curvlab.solvers import BlockConjugateGradient, Nystrom
from curvlab.training import EnsembleLosses, Replay, train

LOSS, SEED = nn.CrossEntropyLoss(), 3


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double().eval()


def data() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(12, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return inputs, torch.arange(12) % 2


DATA = data()
TEST = (DATA[0][:3], DATA[1][:3])
DIRECTIONS = torch.linspace(-1, 2, 46, dtype=torch.float64).view(23, 2).sin()
CHAINS = {"num_chains": 2, "num_burnin_steps": 4, "batch_size": 4}
RUN = {"num_epochs": 3, "batch_size": 6, "record": True}


@dataclass(frozen=True)
class Call:
    """A function or class with what it takes beside model, loss and data.

    Attributes:
        function: the first three arguments may be a problem.
        settings: by name.
        optimizer: of the recorded run, `run=`, after which the model stands; None: it takes none.
    """

    function: Callable[..., Any]
    settings: dict[str, Any] = field(default_factory=dict)
    optimizer: str | None = None

    def __call__(self, *, opened: bool = False, **others: Any) -> Any:
        """Return the numbers; `others` that the function does not take are left out."""
        model, settings = network(), dict(self.settings)
        if self.optimizer is not None:
            rate = {"lr": 0.1, "momentum": 0.0} if self.optimizer == "sgd" else {"lr": 1e-2}
            settings["run"] = train(
                model, LOSS, DATA, optimizer=self.optimizer, **rate, **RUN, progress=False, generator=0
            )
        if self.function is influence.similarities:
            settings["operator"] = GaussNewtonOperator(model, LOSS, DATA) + 0.1 * identity
        triple = (model, LOSS, DATA) if self.takes("loss") else (model, DATA)
        given = (Problem.of(model, LOSS, DATA),) if opened else triple
        with torch.inference_mode(opened and not isinstance(self.function, type)):
            found = self.function(*given, **settings | self.taken(others))
        return [value.detach() for value in model.parameters()] if self.function is train else numbers(found)

    def takes(self, name: str) -> bool:
        return name in inspect.signature(self.function).parameters

    def taken(self, others: dict[str, Any]) -> dict[str, Any]:
        own = {"progress": False, "generator": SEED} | others
        return {name: value for name, value in own.items() if self.takes(name)}


@dataclass(frozen=True)
class OfOperator(Call):
    """A function of an operator, or a solver, which has its settings before."""

    def __call__(self, *, opened: bool = False, **others: Any) -> Any:
        operator = GaussNewtonOperator(network(), LOSS, DATA)
        if not hasattr(self.function, "solve"):
            return numbers(self.function(operator, **self.settings | self.taken(others)))
        generator = others.pop("generator", SEED)
        solver = self.function(**self.settings | self.taken(others))
        return numbers(solver.solve(operator + 0.1 * identity, DIRECTIONS, generator=generator))


@can_be_silent
def _product(operator: LinearOperator, *, progress: bool) -> Tensor:
    return operator @ DIRECTIONS


def numbers(found: Any) -> Any:
    """Return the tensors and numbers of a result, its parts included."""
    if isinstance(found, LinearOperator):
        return _product(found, progress=False)
    if isinstance(found, EnsembleLosses):
        return found.start_losses
    if isinstance(found, Replay):
        return list(found.end())
    if isinstance(found, retraining.LeftOut):
        return found.pull
    if isinstance(found, retraining.ProximalBregmanObjective):
        return found.gradient(DIRECTIONS[:, :1])
    if is_dataclass(found) and not isinstance(found, type):
        names = [each.name for each in fields(found) if each.name not in ("progress", "callback", "memory")]
        return {name: numbers(getattr(found, name)) for name in names}
    if isinstance(found, dict):
        return {name: numbers(part) for name, part in found.items()}
    if isinstance(found, list | tuple):
        return [numbers(part) for part in found]
    return found if isinstance(found, Tensor | int | float | str | None) else type(found).__name__


@dataclass(frozen=True)
class Alone(Call):
    """What takes neither data nor an operator as its first arguments: all of them are settings."""

    def __call__(self, *, opened: bool = False, **others: Any) -> Any:
        return self.function(**self.settings | others)


ITERATIVE = BlockConjugateGradient(rtol=1e-10)
LLC = {"step_size": 1e-4, "localization": 10.0}
CALLS = {
    "GaussNewtonOperator": Call(GaussNewtonOperator),
    "HessianOperator": Call(HessianOperator),
    "FisherOperator": Call(FisherOperator, {"kind": "monte_carlo"}),
    "EnsembleLosses": Call(EnsembleLosses),
    "Replay": Call(Replay, {}, "adam"),
    "LeftOut": Call(retraining.LeftOut, {"groups": [torch.tensor([2, 3])], "damping": 0.1}),
    "ProximalBregmanObjective": Call(
        retraining.ProximalBregmanObjective, {"points": [1], "damping": 0.1, "epsilon": 1e-3}
    ),
    "mean_gradient": Call(problem.mean_gradient),
    "per_example_gradients": Call(influence.per_example_gradients),
    "directional_derivatives": Call(influence.directional_derivatives, {"directions": DIRECTIONS}),
    "train": Call(train, {"num_epochs": 3, "batch_size": 5, "lr": 0.1}),
    "train_ensemble": Call(
        training.train_ensemble,
        {"example_weights": torch.ones(2, 12), "num_epochs": 3, "batch_size": 5, "lr": 0.1},
    ),
    "evaluate": Call(training.evaluate),
    "influence": Call(influence.influence, {"test": TEST, "damping": 1e-3, "solver": ITERATIVE}),
    "influence_scores": Call(influence.influence_scores, {"test": TEST, "damping": 1e-3}),
    "prepare_influence": Call(influence.prepare_influence, {"damping": 0.1}),
    "self_influence": Call(influence.self_influence, {"damping": 0.1, "columns": 4}),
    "self_influence, probes": Call(influence.self_influence, {"damping": 0.1, "num_probes": 9, "columns": 3}),
    "unrolled_response, reverse": Call(influence.unrolled_response, {"test": TEST, "mode": "reverse"}, "sgd"),
    "unrolled_response, forward": Call(influence.unrolled_response, {"test": TEST, "mode": "forward"}, "sgd"),
    "segment_response": Call(influence.segment_response, {"test": TEST, "num_segments": 2}, "sgd"),
    "adam_times": Call(influence.adam_times, {}, "adam"),
    "preconditioned_influence": Call(
        influence.preconditioned_influence, {"test": TEST, "solver": ITERATIVE}, "adam"
    ),
    "similarities": Call(influence.similarities, {"solver": BlockConjugateGradient(), "columns": 3}),
    "explain_gap": Call(influence.explain_gap, {"points": [3]}, "sgd"),
    "output_gaps": Call(
        retraining.output_gaps, {"responses": dict.fromkeys(sum(retraining.GAPS.values(), ()), DIRECTIONS[:, :1])}
    ),
    "proximal_bregman_response": Call(
        influence.proximal_bregman_response,
        {"points": [1], "damping": 0.1, "epsilon": 1e-6, "optimizer": retraining.ProximalSGD(0.1, 4, 3)},
    ),
    "loss_response": Call(influence.loss_response, {"displacement": DIRECTIONS, "epsilon": 1e-3}),
    "ensemble_measurements": Call(influence.ensemble_measurements, {"parameters": DIRECTIONS.T}),
    "estimate_llc": Call(sampling.estimate_llc, CHAINS | LLC | {"num_draws": 8}),
    "choose_sgld_settings": Call(sampling.choose_sgld_settings, CHAINS | {"num_steps": 4}),
    "descent_to_minimum": Call(sampling.descent_to_minimum, {"localization": 10.0, "max_steps": 4}),
    "bayesian_influence": Call(
        sampling.bayesian_influence, CHAINS | LLC | {"test": TEST, "num_draws": 3, "steps_per_draw": 2}
    ),
}
OF_OPERATORS = {
    "exact_traces": OfOperator(curvature.exact_traces),
    "sampled_traces": OfOperator(curvature.sampled_traces),
    "output_curvatures": OfOperator(curvature.output_curvatures),
    "hutchinson_trace": OfOperator(spectrum.hutchinson_trace, {"num_matvecs": 5, "chunk_size": 1}),
    "mean_eigenvalue": OfOperator(spectrum.mean_eigenvalue, {"num_probes": 5, "chunk_size": 1}),
    "hutchpp_trace": OfOperator(spectrum.hutchpp_trace, {"num_matvecs": 9}),
    "xtrace": OfOperator(spectrum.xtrace, {"num_matvecs": 8}),
    "frobenius_norm": OfOperator(spectrum.frobenius_norm, {"num_matvecs": 5, "chunk_size": 1}),
    "hutchinson_diagonal": OfOperator(spectrum.hutchinson_diagonal, {"num_matvecs": 5, "chunk_size": 1}),
    "spectral_density": OfOperator(spectrum.spectral_density, {"num_probes": 2, "num_steps": 3}),
    "top_eigenvalues": OfOperator(spectrum.top_eigenvalues, {"max_matvecs": 4}),
    "sketch_eigenvalues": OfOperator(spectrum.sketch_eigenvalues, {"k": 1, "sketch_size": 6, "chunk_size": 2}),
    "measure_recipe, uniform": OfOperator(
        solvers.measure_recipe, {"damping": 0.1, "sampling": "uniform", "budget": 10.0}
    ),
    "measure_recipe, importance": OfOperator(solvers.measure_recipe, {"damping": 0.1}),
    "measure_constant": OfOperator(
        solvers.measure_constant, {"directions": DIRECTIONS, "trace": 1.0, "num_batches": 5, "batch_size": 4}
    ),
    "Lissa.auto": OfOperator(solvers.Lissa.auto, {"damping": 0.1, "sampling": "uniform"}),
    "Lissa": OfOperator(solvers.Lissa, {"step_size": 0.1, "batch_size": 4, "num_steps": 5}),
    "ConjugateGradient": OfOperator(solvers.ConjugateGradient),
    "BlockConjugateGradient": OfOperator(BlockConjugateGradient, {"preconditioner": Nystrom(3), "rtol": 1e-9}),
    "MinimumResidual": OfOperator(solvers.MinimumResidual),
    "TrainingFilter": OfOperator(solvers.TrainingFilter, {"time": 9.0}),
}
NETWORK = network()
PARAMETERS = {"params": list(NETWORK.parameters())}
FISHER = FisherOperator(NETWORK, LOSS, DATA)
BESIDE = {
    "Ginger": Alone(optim.Ginger, PARAMETERS | {"lr": 0.1, "rank": 2, "decay": 0.9, "damping": 0.1}),
    "QNG": Alone(optim.QNG, PARAMETERS | {"lr": 0.1, "rank": 2, "decay": 0.9}),
    "NGD": Alone(optim.NGD, PARAMETERS | {"lr": 0.1}),
    "ExactNGD": Alone(optim.ExactNGD, PARAMETERS | {"fisher": FISHER, "lr": 0.1}),
    "FisherNewton": Alone(optim.FisherNewton, PARAMETERS | {"fisher": FISHER}),
    "CubicNewton": Alone(optim.CubicNewton, PARAMETERS | {"hessian": FISHER}),
    "UniformDirection": Alone(optim.UniformDirection, PARAMETERS | {"hessian": FISHER, "lr": 1.0, "delta": 0.1}),
    "Direct": Alone(solvers.Direct),
    "Nystrom": Alone(Nystrom, {"rank": 3}),
    "Rows": Alone(solvers.Rows),
    "Ekfac": Alone(solvers.Ekfac),
    "ProximalSGD": Alone(retraining.ProximalSGD, {"step_size": 0.1, "num_steps": 4, "batch_size": 3}),
    "ProximalNewton": Alone(retraining.ProximalNewton),
    "RMSProp": Alone(sampling.RMSProp, {"decay": 0.9, "damping": 0.1}),
    "default_nbeta": Alone(sampling.default_nbeta, {"num_examples": 12}),
    "corrupt_labels": Alone(
        influence.corrupt_labels, {"labels": DATA[1], "num_classes": 2, "fraction": 0.5, "generator": 0}
    ),
    "linear_datamodelling_score": Alone(
        influence.linear_datamodelling_score,
        {"scores": DIRECTIONS.T, "subsets": torch.ones(4, 23), "retrained_losses": DIRECTIONS[:4]},
    ),
    "random_halves": Alone(influence.random_halves, {"num_examples": 12, "num_subsets": 3, "generator": 0}),
    "BatchOrder": Alone(training.BatchOrder, {"num_examples": 12, "batch_size": 3}),
    "default_solver": Alone(solvers.default_solver, {"size": 12, "num_columns": 2}),
    "importance_probabilities": Alone(curvature.importance_probabilities, {"scores": torch.ones(12)}),
    "steps_bound": Alone(
        optim.steps_bound, {"epsilon": 0.1, "gap": 1.0, "gradient_norm": 1.0, "hessian_lipschitz": 1.0}
    ),
    "lissa_hyperparameters": Alone(
        solvers.lissa_hyperparameters, {"trace": 10.0, "largest_eigenvalue": 4.0, "damping": 1.0}
    ),
    "shuffled_batches": Alone(
        training.shuffled_batches, {"num_examples": 12, "batch_size": 3, "num_epochs": 1, "generator": 0}
    ),
    "cosine_after_warmup": Alone(training.cosine_after_warmup, {"warmup_steps": 2}),
}
