"""Units of work: the responses of one network to leaving points out, their distances and changes of losses."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from curvlab.influence import directional_derivatives, loss_response
from curvlab.influence.retraining import (
    RETRAINED,
    DownweightedCost,
    LeftOut,
    cold_optimum,
    curvature_operator,
    influence_estimate,
    output_gaps,
    two_stage_optimum,
    warm_optimum,
)
from curvlab.lab import Run, task_settings, unit
from curvlab.spectrum import top_eigenvalues
from curvlab.training import TrainingDivergedError
from experiments.pbrf.networks import NOTHING, Network, load_network
from experiments.pbrf.solvers import SCALES, BunchKaufman, RepeatedLissa, descent, matrix_functions, series

CHUNK = 512  # examples at a time
DENSE = 5000  # parameters up to which all eigenvalues of the Hessian are computed, as `Direct` solves
NORMS = ("per_example", "total")
RESPONSES = RETRAINED | {"slow_warm": warm_optimum}  # the latter at the learning rate of the PBRF
TWO_STAGES = {"two_stage": "warm", "slow_two_stage": "slow_warm"}
CURVATURES = ("gauss_newton", "hessian")
EXACT, OWN_LENGTH = "exact", "own length"


def lissa_name(scale: float) -> str:
    """Return what tables call LiSSA at a scaling."""
    return f"LiSSA, σ = {scale:g}"


@dataclass(frozen=True)
class Decomposition:
    """Responses to leaving `num_points` random points or groups out, one at a time, each computed when asked for.

    A response is stored with its displacements, (K, P) numbers: 150 MB for 20 points of two million parameters in
    single precision. One that diverges is nan.

    Attributes:
        network: at θ^s.
        num_points: K.
        fraction: of the training set that each of K random groups holds, smaller ones inside larger ones; None:
            single points.
    """

    network: Network
    num_points: int
    fraction: float | None = None

    @cached_property
    def points(self) -> Tensor:
        """The K training points, (K,)."""
        generator = self.network.generator("pbrf points", self.network.seed)
        return torch.randperm(len(self.network.train[1]), generator=generator)[: self.num_points]

    @cached_property
    def groups(self) -> list[Tensor]:
        """What is left out, one at a time."""
        if self.fraction is None:
            return list(self.points[:, None])
        size, generator = len(self.network.train[1]), self.network.generator("pbrf groups", self.network.seed)
        taken = max(1, round(self.fraction * size))
        return [torch.randperm(size, generator=generator)[:taken] for _ in range(self.num_points)]

    @cached_property
    def left_out(self) -> LeftOut:
        """Each group left out by itself."""
        return self.network.left_out(self.groups)

    @property
    def run(self) -> Run:
        """The network's."""
        return self.network.run

    @property
    def key(self) -> dict[str, Any]:
        """What the points depend on."""
        return self.network.key | {"num_points": self.num_points, "fraction": self.fraction}

    def with_damping(self, damping: float) -> Decomposition:
        """Return the same network and points with another damping."""
        settings = self.network.settings.copy()
        settings.damping = damping
        return replace(self, network=replace(self.network, settings=settings))

    # -------------------------------------------------------------------------------- displacements
    def displacement(self, name: str) -> Tensor:
        """Return displacements from θ^s, (K, P).

        cold, warm, proximal, proximal_bregman, linearised, two_stage, slow_two_stage (at the learning rate of the
        PBRF); base (zero); or those of the influence estimate with a matrix, gauss_newton or hessian.
        """
        if name == "base":
            return torch.zeros(len(self.groups), len(self.network.initial)).to(self.left_out.base)
        if name in CURVATURES:
            return self.influence(name)[0]
        if name in TWO_STAGES:
            warm = self._stored(TWO_STAGES[name])
            return two_stage_optimum(warm[:-1], warm[-1])
        found = self._stored(name)
        return found[:-1] if name in TWO_STAGES.values() else found

    def is_solved(self, curvature: str) -> bool:
        """Whether the exact estimate is computed: not if `influence` has null, nor H's without `hessian_seeds`."""
        settings = self.network.settings
        seeds = settings.get("hessian_seeds") if curvature == "hessian" else None
        return settings.influence.get(curvature) is not None and (seeds is None or self.network.seed in seeds)

    def influence(self, curvature: str) -> tuple[Tensor, float]:
        """Return the displacements of the influence estimate, (K, P), and its largest relative residual."""
        found = _influence(self, **self._more(curvature))
        return found["displacement"].to(self.left_out.base), found["residual"]

    def _stored(self, name: str) -> Tensor:
        return _response(self, **self._more(name))["displacement"].to(self.left_out.base)

    def _more(self, name: str) -> dict[str, Any]:
        """Return what a displacement depends on beside the points; the damping enters no cold or warm start."""
        settings, more = self.network.settings, dict[str, Any](response=name)
        if name in CURVATURES:
            more |= {"solver": dict(settings.influence[name])}
        if name in ("proximal_bregman", "linearised", "slow_warm", "slow_two_stage"):
            more |= {"bregman_lr_divisor": settings.bregman_lr_divisor}
        undamped = name in ("cold", *TWO_STAGES, *TWO_STAGES.values())
        return more if undamped else more | {"damping": settings.damping}

    def in_double(self) -> LeftOut:
        """Return the groups left out of a network and data in double precision."""
        network = self.network
        inputs, targets = (t.to(torch.float64) if t.is_floating_point() else t for t in network.train)
        model = copy.deepcopy(network.model).to(torch.float64)
        return replace(network, model=model, train=(inputs, targets)).left_out(self.groups)

    def further_trained(self) -> Tensor:
        """Return the displacement after K/2 epochs more at the PBRF's learning rate, nothing left out, (P,)."""
        return self._stored("slow_warm")[-1]

    def output_gradients(self, displacement: Tensor | None) -> Tensor:
        """Return the gradients of the K points' losses by the outputs, at a displacement or at θ^s."""
        network, model = self.network, copy.deepcopy(self.network.model)
        if displacement is not None:
            start = parameters_to_vector(model.parameters()).detach()
            vector_to_parameters(start + displacement.to(start), model.parameters())
        inputs, targets = (part[self.points] for part in network.train)
        outputs = model(inputs)
        return torch.autograd.grad(network.loss(outputs, targets), outputs)[0]

    # -------------------------------------------------------------------------------- distances
    def distance(self, first: str, second: str) -> Tensor:
        """Return the distance between the outputs of two displacements, (K, 2): see `NORMS`.

        Per example (divided by √N), and over all N examples, also where only a part of them was compared.
        """
        ends = {end: self.key | self._more(name) for end, name in (("first", first), ("second", second))}
        examples = self.network.settings.gap_examples
        return _distance(self.run, self, first, second, **ends, gap_examples=examples)["distance"]

    def distances(self, pairs: Mapping[str, tuple[str, str]], curvature: str) -> dict[str, Tensor]:
        """Return distances by name of pairs, where "influence" is that with a matrix; nan where not solved."""
        nothing, solved = torch.full((len(self.groups), len(NORMS)), math.nan), self.is_solved(curvature)
        return {
            name: self.distance(*(curvature if end == "influence" else end for end in pair))
            if solved or "influence" not in pair
            else nothing
            for name, pair in pairs.items()
        }

    def apart(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the distance between the outputs of two displacements, (K, 2), not stored."""
        found = output_gaps(self.network.model, self._compared, {"a": first, "b": second})["a-b"].per_example
        return torch.stack([found, found * len(self.network.train[1]) ** 0.5], dim=1)

    @cached_property
    def _compared(self) -> tuple[Tensor, Tensor]:
        """The examples whose outputs are compared."""
        inputs, targets = self.network.train
        wanted = self.network.settings.gap_examples
        if wanted is None or wanted >= len(targets):
            return inputs, targets
        chosen = torch.randperm(len(targets), generator=self.network.generator("pbrf gap examples"))[:wanted]
        return inputs[chosen], targets[chosen]

    # -------------------------------------------------------------------------------- changes of losses
    def loss_changes(self, name: str) -> Tensor:
        """Return the changes of the test losses when the network moves to a displacement, (num_test, K)."""
        return _loss_changes(self, **self._more(name), num_test=len(self.network.test[1]))["changes"]

    def predicted_changes(self, curvature: str) -> Tensor:
        """Return the first-order changes of the test losses by influence, Eq. 20, (num_test, K)."""
        return _predicted_changes(self, **self._more(curvature), num_test=len(self.network.test[1]))["changes"]

    def predicted(self, displacement: Tensor) -> Tensor:
        """Return the first-order changes of the test losses at displacements (K, P), (num_test, K), not stored."""
        network, columns = self.network, displacement.T.contiguous()
        return directional_derivatives(network.model, network.loss, network.test, columns).double().cpu()

    # -------------------------------------------------------------------------------- LiSSA
    def truncated(self, curvature: str) -> dict[str, dict[str, Any]]:
        """Return what LiSSA at each scaling, and the filter of the PBRF's own length, predict; a unit of work.

        By the estimate's name: `predicted` changes of the test losses (num_test, K); `solver`, the distance to the
        linearised response, and `moved`, that to θ^s, (K, 2) each, or nan where the estimate is not finite; and
        `change`, how far from converged the Krylov space is that it was taken in (nan of sampled batches). With
        `lissa.batch_size` null LiSSA is that of the whole matrix, the mean of the recursion; else it is run.
        Nothing where `lissa` is null.
        """
        network, settings = self.network, self.network.settings.get("lissa")
        if settings is None:
            return {}
        found = _lissa(
            self.run,
            self,
            linearised=self.key | self._more("linearised"),
            curvature=curvature,
            lissa=dict(settings),
            num_test=len(network.test[1]),
            gap_examples=network.settings.gap_examples,
        )
        names = found["names"]
        return {name: {part: found[part][i] for part in found if part != "names"} for i, name in enumerate(names)}

    def lissa_at_smallest(self, curvature: str) -> dict[str, Any]:
        """Return what `truncated` has of LiSSA at the smallest scaling at which it is finite, with its `name`."""
        known = self.truncated(curvature)
        for name in map(lissa_name, SCALES):
            if name in known and known[name]["moved"].isfinite().all():
                return known[name] | {"name": name}
        return {}

    # -------------------------------------------------------------------------------- the network
    def hessian_spectrum(self) -> dict[str, float]:
        """Return `smallest`, `num_below` and `nearest` of the eigenvalues μ of the cost's Hessian at θ^s, with L2.

        How many lie below -λ, and min |μ + λ|: where any lie below, H + λI has no minimum to offer, and where one
        lies near -λ, its inverse has no bound. Above `DENSE` parameters only the smallest eigenvalue is estimated,
        by Lanczos, from above; the other two are nan, but for `num_below` where `BunchKaufman` counted it.
        """
        network, damping = self.network, self.network.settings.damping
        found = _hessian_spectrum(network)["eigenvalues"]
        known = len(found) == len(network.initial)
        num_below = (
            _influence(self, **self._more("hessian"))["num_negative"] if self.is_solved("hessian") else None
        )
        if num_below is None:
            num_below = float((found < -damping).sum()) if known else math.nan
        nearest = float((found + damping).abs().min()) if known else math.nan
        return {"smallest": float(found.min()), "num_below": float(num_below), "nearest": nearest}

    def base_state(self) -> dict[str, float]:
        """Return, at θ^s, training loss (without L2), gradient norm of the cost (with L2), and test loss.

        With `constant_loss`, the training loss of the best constant outputs: above it nothing was learned.
        """
        return _base_state(self.network, num_test=len(self.network.test[1]))


# ------------------------------------------------------------------------------------ units of work
@unit("pbrf/response", version=2, about="{response} response, {seed_name}, seed {network_seed}", resumes=True)
def _response(points: Decomposition, /, *, response: str, checkpoint: Path, **_: Any) -> dict[str, Any]:
    network = points.network
    minimizer = network.minimizer(response, checkpoint)
    # The retraining with nothing left out that D.2 subtracts goes along as one more group.
    pairs = response in TWO_STAGES.values()
    left_out = network.left_out([*points.groups, NOTHING]) if pairs else points.left_out
    try:
        if response == "cold":
            moved = cold_optimum(left_out, minimizer, initial=network.initial)
        else:
            moved = RESPONSES[response](left_out, minimizer)
    except TrainingDivergedError:
        moved = torch.full((len(left_out.groups), len(network.initial)), math.nan)
    return {"displacement": moved.cpu()}


@unit("pbrf/influence", version=2, about="influence by {response}, {seed_name}, seed {network_seed}")
def _influence(points: Decomposition, /, *, response: Any, **_: Any) -> dict[str, Any]:
    network = points.network
    solver: Any = instantiate(network.settings.influence[response])
    # H + λI at a network that has not converged has eigenvalues on both sides of zero and next to it. In single
    # precision its rounding is larger than those.
    left_out = points.in_double() if isinstance(solver, BunchKaufman) else points.left_out
    generator = network.generator("pbrf influence", network.seed)
    found, solution = influence_estimate(left_out, solver, curvature=response, generator=generator)
    network.run.add_matvecs(solution.num_matvecs)
    known = {"num_negative": getattr(solution, "num_negative", None)}
    return {"displacement": found.cpu(), "residual": float(solution.residual.max())} | known


@unit("pbrf/distance", version=2)
def _distance(_: Run, points: Decomposition, one: str, other: str, /, **_key: Any) -> dict[str, Any]:
    return {"distance": points.apart(points.displacement(one), points.displacement(other))}


@unit("pbrf/loss_changes", version=2)
def _loss_changes(points: Decomposition, /, *, response: str, **_: Any) -> dict[str, Any]:
    network, columns = points.network, points.displacement(response).double().T
    return {"changes": loss_response(network.model, network.loss, network.test, columns, epsilon=1.0).cpu()}


@unit("pbrf/predicted_changes", version=2)
def _predicted_changes(points: Decomposition, /, *, response: str, **_: Any) -> dict[str, Any]:
    return {"changes": points.predicted(points.displacement(response))}


@unit("pbrf/lissa", version=1, about="LiSSA by {curvature}, {linearised[seed_name]}")
def _lissa(run: Run, points: Decomposition, /, *, curvature: Any, num_test: int, **_: Any) -> dict[str, Any]:
    """Return what `truncated` has of each estimate, in lists, and their `names`."""
    network, settings = points.network, points.network.settings.lissa
    operator, b = curvature_operator(points.left_out, curvature), -points.left_out.pull.T.contiguous()
    length = network.length("proximal_bregman")
    functions = {} if math.isnan(length) else {OWN_LENGTH: descent(length)}
    if settings.batch_size is None:
        functions |= {lissa_name(scale): series(scale, settings.num_steps) for scale in SCALES}
    found = matrix_functions(operator, b, functions, rtol=settings.rtol, max_steps=settings.max_steps)
    run.add_matvecs(found.num_matvecs)
    values, change = found.values, found.change
    for scale in SCALES if settings.batch_size is not None else ():
        generator = network.generator("pbrf lissa", network.seed, curvature, scale)
        solver = RepeatedLissa(settings.batch_size, settings.num_steps, settings.num_repeats, [scale])
        solution = solver.solve(operator, b, generator=generator)
        run.add_matvecs(solution.num_matvecs)
        values[lissa_name(scale)], change[lissa_name(scale)] = solution.x, math.nan
    parts: dict[str, list[Any]] = {"predicted": [], "solver": [], "moved": [], "change": list(change.values())}
    nothing = torch.full((num_test, len(points.groups)), math.nan, dtype=torch.float64)
    for columns in values.values():
        moved = columns.T.contiguous().to(points.left_out.base)
        finite = bool(moved.isfinite().all())
        parts["predicted"].append(points.predicted(moved) if finite else nothing)
        for name, other in (("solver", "linearised"), ("moved", "base")):
            apart = points.apart(moved, points.displacement(other)) if finite else nothing[:2].T
            parts[name].append(apart)
    return {"names": list(values)} | parts


@unit("pbrf/hessian_spectrum", version=1, about="eigenvalues of the Hessian, {seed_name}, seed {network_seed}")
def _hessian_spectrum(network: Network, /, **_: Any) -> dict[str, Any]:
    operator, damping = curvature_operator(network.left_out([NOTHING]), "hessian"), network.settings.damping
    if len(network.initial) <= DENSE:
        dense = operator.to_dense().double()
        return {"eigenvalues": torch.linalg.eigvalsh((dense + dense.T) / 2).cpu() - damping}
    generator = network.generator("pbrf lanczos", network.seed)
    found = top_eigenvalues(-1.0 * operator, rtol=1e-2, max_matvecs=60, generator=generator)
    network.run.add_matvecs(found.num_matvecs)
    return {"eigenvalues": -found.values - damping}


@unit("pbrf/base_state", version=2)
def _base_state(network: Network, /, **_: Any) -> dict[str, float]:
    left_out, everything = network.left_out([NOTHING]), torch.arange(len(network.train[1]))
    gradient = over_all(DownweightedCost(left_out), torch.zeros_like(left_out.base)[None], everything)[1]
    test = LeftOut(network.model, network.loss, network.test, [NOTHING], damping=1.0)
    return {
        "train_loss": float(left_out.losses.start_losses.mean()),
        "gradient_norm": float(gradient.norm()),
        "test_loss": float(test.losses.start_losses.mean()),
        "constant_loss": constant_loss(network.loss, network.train[1]),
    }


def over_all(objective: Any, displacement: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return values (K,) and gradients (K, P), means over as many examples as there are indices."""
    values, gradients = torch.zeros_like(displacement[:, 0]), torch.zeros_like(displacement)
    for chunk in indices.split(CHUNK):
        share = len(chunk) / len(indices)
        own = objective(displacement, chunk)
        values, gradients = values + own[0] * share, gradients + own[1] * share
    return values, gradients


def constant_loss(loss: nn.Module, targets: Tensor) -> float:
    """Return the least mean loss over `targets` of outputs that do not depend on the input.

    Cross-entropy: the entropy of the frequencies of classes (of tokens; -100 is left out); binary cross-entropy:
    that of each output's mean; squared error: the variance; the latter two are means over the outputs.
    """
    if isinstance(loss, nn.CrossEntropyLoss):
        classes = targets[targets != loss.ignore_index].flatten()
        shares = torch.bincount(classes).double() / len(classes)
        return float(torch.special.entr(shares).sum())
    columns = targets.double().reshape(len(targets), -1)
    if isinstance(loss, nn.BCEWithLogitsLoss):
        shares = columns.mean(0)
        return float((torch.special.entr(shares) + torch.special.entr(1 - shares)).mean())
    if isinstance(loss, nn.MSELoss):
        return float(columns.var(0, correction=0).mean())
    raise TypeError(f"the best constant outputs are not known for {type(loss).__name__}")


def rows_of_networks(
    run: Run, cfg: DictConfig, rows_of: Callable[[Decomposition], Iterable[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the rows of every task's network of each seed, beside the task's label and the seed."""
    return [
        {"task": found.network.label, "seed": seed} | row
        for name, settings in task_settings(cfg).items()
        for seed in settings.seeds
        for found in [Decomposition(load_network(run, name, settings, seed), settings.num_points)]
        for row in rows_of(found)
    ]
