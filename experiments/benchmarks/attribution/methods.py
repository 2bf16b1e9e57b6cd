"""The scores that are compared, all of one sign and unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Self

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.influence import (
    influence_scores,
    loss_response,
    per_example_gradients,
    segment_response,
    subset_weights,
    unrolled_response,
)
from curvlab.influence.retraining import MAX_WHOLE_GROUP, LeftOut, ProximalBregmanCost, curvature_operator
from curvlab.lab import unit
from curvlab.linalg import LinearOperator, identity
from curvlab.solvers import Ekfac, Nystrom
from experiments.benchmarks.attribution.libraries.process import limits_of, measure, stored_network
from experiments.benchmarks.attribution.network import Network, Trained
from experiments.shared.gauges import work_clock

DOT, COSINE = "gradient dot product", "gradient cosine"
INFLUENCE, RUN_DAMPING, FILTER = "influence", "influence at the run's damping", "filter of the run"
EKFAC, SEGMENTS = "EK-FAC", "SOURCE with exact segments"
UNROLLED, UNROLLED_ORDERS = "unrolled", "unrolled over other orders"
PBRF, PBRF_PAPER = "PBRF at the run's damping", "PBRF at the paper's damping"
PBRF_HALVES = "PBRF of each half"
TRAK = "TRAK"
REPEAT_BELOW = 5.0  # seconds of a first call; in a longer one what is loaded for it is little


@dataclass(frozen=True)
class Method:
    """One row: a way to score.

    Attributes:
        name: of the method; rows of one name differ by their damping.
        damping: of the row; None where there is none to choose. TRAK's is its ridge `lambda_reg`, added to the
            sum, not the mean, of outer products of projected features: another unit.
        key: what its scores depend on beside the network.
        compute: returns {"status": "done", "scores": (M, N)}, or {"status": "done", "predicted": (S, M)} for the
            subsets, or the status that says why there are none.
    """

    name: str
    damping: float | None
    key: dict[str, Any]
    compute: Callable[[], dict[str, Any]]

    @classmethod
    def of(cls, name: str, scores: Callable[[], Tensor], damping: float | None = None, **key: Any) -> Self:
        """Return the row of a function that returns scores, (M, N)."""
        return cls(name, damping, key, lambda: {"status": "done", "scores": scores()})


class Stopwatch:
    """Calls methods and adds the seconds to what they return.

    A method's first call is repeated where it was short: what PyTorch loads and compiles for it is no method's.
    Peers are measured likewise, by their own process.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock, self._called = work_clock(device), set[str]()

    def __call__(self, method: Method) -> dict[str, Any]:
        """Return what the method does, with its seconds."""
        result = self._timed(method)
        if method.name not in self._called and "cpu_seconds" not in result and result["seconds"] < REPEAT_BELOW:
            result = self._timed(method)
        self._called.add(method.name)
        return result

    def _timed(self, method: Method) -> dict[str, Any]:
        start = self._clock()
        result = method.compute()
        return {"seconds": self._clock() - start} | result


def scored(network: Network, stopwatch: Stopwatch, method: Method) -> dict[str, Any]:
    """Return what a method does on a network, with its seconds; a unit of work."""
    of = {"num_queries": network.settings.num_queries, "method": method.name, "damping": method.damping}
    return _scored(network, stopwatch, method, **of, **method.key)


@unit("attribution/scores", version=2, about="{method} of {seed_name}")
def _scored(network: Network, stopwatch: Stopwatch, way: Method, /, **_: Any) -> dict[str, Any]:
    return stopwatch(way)


def methods(trained: Trained, subsets: Tensor) -> Iterator[Method]:
    """Yield every method of the config, for one network and the subsets (S, N) that it is to predict."""
    yield from own_scores(trained)
    orders = trained.settings.num_orders
    if orders > 1:
        yield Method.of(UNROLLED_ORDERS, partial(_unrolled_over_orders, trained), num_orders=orders)
    yield from _bregman(trained, subsets)
    yield from peers(trained)


def own_scores(trained: Trained) -> Iterator[Method]:
    """Yield what this library scores with, at every damping of the config."""
    settings, rtol = trained.settings, float(trained.settings.rtol)
    yield Method.of(DOT, partial(_dots, trained, cosine=False))
    yield Method.of(COSINE, partial(_dots, trained, cosine=True))
    by_solving = partial(influence_scores, *trained.arguments, rtol=rtol)
    for damping in settings.dampings:
        yield Method.of(INFLUENCE, partial(by_solving, damping=damping), damping, rtol=rtol)
    yield Method.of(RUN_DAMPING, partial(by_solving, run=trained.length), rtol=rtol)
    yield Method.of(FILTER, partial(by_solving, run=trained.length, filtered=True), rtol=rtol)
    size = ekfac_size(settings)
    for damping in grid_of(settings, "damping"):
        yield Method.of(EKFAC, partial(_ekfac, trained, damping, **size), damping, **size)
    parts = dict(settings.segments)
    source = partial(segment_response, *trained.arguments, run=trained.training, rtol=rtol, **parts)
    yield Method.of(SEGMENTS, lambda: source().scores, **parts)
    yield Method.of(UNROLLED, partial(unrolled, trained))


def ekfac_size(settings: DictConfig) -> dict[str, Any]:
    """Return the side of a layer up to which our EK-FAC factors it, where the config has one."""
    return {"max_size": settings.ekfac_max_size} if settings.ekfac_max_size else {}


def grid_of(settings: DictConfig, option: str) -> list[float]:
    """Return what an option takes: the dampings of every EK-FAC, or the ridges of TRAK, in a unit of their own.

    Of EK-FAC there may be others than of exact influence, which takes longer at a small one.
    """
    grids = {"damping": settings.ekfac_dampings or settings.dampings, "lambda_reg": settings.get("ridges")}
    return list(grids[option])


def gradients(trained: Trained) -> tuple[Tensor, Tensor]:
    """Return those of the queries, (M, P), and of the training examples, (N, P)."""
    of = partial(per_example_gradients, trained.model, trained.loss)
    return of(trained.test), of(trained.train)


def unrolled(trained: Trained) -> Tensor:
    """Return the scores by the derivative of the whole training."""
    return unrolled_response(*trained.arguments, run=trained.training).scores


def _dots(trained: Trained, *, cosine: bool) -> Tensor:
    test, points = gradients(trained)
    if cosine:
        test, points = nn.functional.normalize(test), nn.functional.normalize(points)
    return -test @ points.T


def _ekfac(trained: Trained, damping: float, **recipe: Any) -> Tensor:
    operator = GaussNewtonOperator(trained.model, trained.loss, trained.train) + damping * identity
    inverse, _ = Ekfac(**recipe).build(operator, generator=trained.generator("ekfac"))
    test, points = gradients(trained)
    return -(inverse @ test.T.contiguous()).T @ points.T


def _unrolled_over_orders(network: Network) -> Tensor:
    """Return the mean of the unrolled scores of trainings in orders that are never judged, as many as are."""
    first = network.settings.num_orders
    return torch.stack([unrolled(network.trained(order)) for order in range(first, 2 * first)]).mean(0)


# ----------------------------------------------------------------------------------------- peers
def peers(trained: Trained) -> Iterator[Method]:
    """Yield the public libraries' scores; `networks`: of as many others, from seeds by which nothing is judged."""
    settings = trained.settings
    python, limits = limits_of(settings)
    for name, options in settings.peers.items():
        asked = {key: value for key, value in options.items() if key not in ("grid", "networks")}
        # `grid`: of which option; null: none; "run": the run's damping.
        alone: dict[str | None, list[Any]] = {None: [None], "run": [trained.length.damping]}
        for value in alone.get(options.grid) or grid_of(settings, options.grid):
            own = asked | ({"lambda_reg": float(value)} if options.grid == "lambda_reg" else {})
            key = limits | {"options": own, "peers": python is not None}
            stored = stored_network(trained.model, settings, trained.train, trained.test)
            stored["damping"] = float(value) if options.grid in ("damping", "run") else 0.0
            own = own | {"num_threads": 1, "repeat_below": REPEAT_BELOW}
            compute = partial(measure, stored, own, peers_python=python, **limits)
            if options.get("networks"):
                key |= {"networks": options.networks}
                compute = partial(_of_others, trained, int(options.networks), stored, compute)
            damping = None if options.grid in (None, "run") else float(value)
            yield Method(str(name), damping, key, compute)


def _of_others(
    network: Network, number: int, stored: dict[str, Any], measured: Callable[..., dict[str, Any]]
) -> dict[str, Any]:
    """Return a library's scores over networks of other seeds, whose trainings are in their seconds."""
    first = int(network.settings.num_networks)
    others = [network.at(seed).trained(seed) for seed in range(first, first + number)]
    stored["ensemble"] = [[p.detach().cpu() for p in other.model.parameters()] for other in others]
    found = measured()
    if found["status"] == "done":
        found["cpu_seconds"] += sum(other.seconds for other in others)
    return found


# ------------------------------------------------------------------------------------ responses
# The proximal Bregman response (PBRF): of every training example, as a score, and of whole subsets.
def _bregman(trained: Trained, subsets: Tensor) -> Iterator[Method]:
    settings, key = trained.settings, dict(trained.settings.responses)
    by_run = ProximalBregmanResponses(trained, trained.length.damping)
    yield Method(PBRF, None, key, by_run.scores)
    if settings.pbrf_at_paper_damping:
        paper = float(settings.paper_damping)
        yield Method(PBRF_PAPER, paper, key, ProximalBregmanResponses(trained, paper).scores)
    yield Method(PBRF_HALVES, None, key | {"num_subsets": len(subsets)}, partial(by_run.of_subsets, subsets))


class SubsetsAlone(LeftOut):
    """The cost is the mean over what is not left out, as in the retrainings: w_ki = N / size there, else 0."""

    @cached_property
    def weights(self) -> Tensor:
        """w, (K, N)."""
        kept = torch.ones(len(self.groups), self.num_examples, dtype=torch.bool)
        for row, group in zip(kept, self.groups, strict=True):
            row[group] = False
        return subset_weights(kept).to(self.base)


class ProximalBregmanResponses:
    """Responses of one trained network, by Newton's method with one matrix for all of them.

    The objective is Eq. 8 of Bae et al. (2022), `ProximalBregmanCost`. Each starts at the trained network with the
    influence estimate as its first step; what a step leaves of the gradient is how far they are apart.

    Args:
        trained: θ^s, its data and settings, see `responses` in conf/benchmarks/attribution.yaml.
        damping: λ of the proximity term.
    """

    def __init__(self, trained: Trained, damping: float) -> None:
        self.trained, self.run, self.settings = trained, trained.run, trained.settings.responses
        sizes = {name: trained.settings[name] for name in ("num_queries", "num_subsets")}
        self.key = trained.key | sizes | {"damping": damping, "responses": dict(self.settings)}
        self._of: dict[str, float] = {"damping": damping, "l2": trained.length.weight_decay}

    def scores(self) -> dict[str, Any]:
        """Return (M, N) scores, -N times the change of a test loss when an example is left out, and their quality.

        Quality: the gradient norm of the objective over that at θ^s, median and 90 % quantile over examples. The
        response of an example whose objective has no minimum nearby stays where its gradient was smallest.
        """
        num_train = self.trained.num_train
        parts = [
            self._part(list(some[:, None]), LeftOut, part=f"examples {int(some[0])} and on")
            for some in torch.arange(num_train).split(self.settings.at_once)
        ]
        return self._gathered(parts) | {"scores": -num_train * torch.cat([p["changes"] for p in parts], dim=1)}

    def of_subsets(self, subsets: Tensor) -> dict[str, Any]:
        """Return the change of test losses when all but a subset is left out at once, (S, N) -> (S, M)."""
        left_out = [row.logical_not().nonzero().flatten() for row in subsets]
        if min(map(len, left_out)) <= MAX_WHOLE_GROUP:
            raise ValueError(
                f"subsets must leave out more than {MAX_WHOLE_GROUP} examples: of smaller groups "
                "ProximalBregmanCost takes the members, not their weights"
            )
        at_once = self.settings.at_once
        parts = [
            self._part(left_out[start : start + at_once], SubsetsAlone, part=f"subsets {start} and on")
            for start in range(0, len(left_out), at_once)
        ]
        return self._gathered(parts) | {"predicted": torch.cat([part["changes"] for part in parts], dim=1).T}

    @unit("attribution/pbrf", version=1, about="PBRF of {seed_name}, {part}")
    def _part(self, groups: list[Tensor], kind: type[LeftOut], /, **_: Any) -> dict[str, Any]:
        """Return the responses to groups, which follow from what identifies the network and the part's name."""
        clock, trained = work_clock(self.run.device), self.trained
        num_steps = self.settings.num_steps if kind is LeftOut else self.settings.num_steps_of_subsets
        start = clock()
        left_out = kind(trained.model, trained.loss, trained.train, groups, **self._of)
        everything = torch.arange(trained.num_train, device=left_out.base.device)
        objective = partial(ProximalBregmanCost(left_out), indices=everything)
        origin = torch.zeros(len(groups), len(left_out.base)).to(left_out.base)
        displacement, norms = near_minimum(objective, origin, inverse=self._inverse, num_steps=num_steps)
        # In float64: a test loss changes in its last digits.
        columns = displacement.T.double().contiguous()
        changes = loss_response(trained.model, trained.loss, trained.test, columns, epsilon=1.0)
        return {"changes": changes.cpu(), "gradient_norm": norms.cpu(), "seconds": clock() - start}

    @cached_property
    def _inverse(self) -> LinearOperator:
        """Approximates (G + (λ + l2) I)⁻¹ at θ^s."""
        nobody = LeftOut(self.trained.model, self.trained.loss, self.trained.train, [], **self._of)
        operator = curvature_operator(nobody, "gauss_newton")
        return Nystrom(self.settings.rank).build(operator, generator=self.trained.generator("PBRF"))[0]

    def _gathered(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        norms = torch.cat([part["gradient_norm"] for part in parts]).double()
        quality = {"gradient_norm": float(norms.quantile(0.5)), "gradient_norm_90": float(norms.quantile(0.9))}
        return {"status": "done", "cpu_seconds": sum(part["seconds"] for part in parts)} | quality


def near_minimum(
    objective: Callable[[Tensor], tuple[Tensor, Tensor]], start: Tensor, *, inverse: LinearOperator, num_steps: int
) -> tuple[Tensor, Tensor]:
    """Return u <- u - t M ∇Q(u) after some steps, (K, P), and ‖∇Q‖ over that at the start, (K,).

    A step that does not bring a copy's gradient down is not taken, and its next one is a quarter as long: of an
    objective without a minimum nearby the copy stays where it was.

    Args:
        objective: (K, P) -> K values and their gradients (K, P).
        start: (K, P).
        inverse: M, (P, P), shared by all copies.
        num_steps: each a gradient of every copy.
    """
    found, gradient = start.clone(), objective(start)[1]
    first = norms = gradient.norm(dim=1)
    lengths = torch.ones_like(norms)
    for _ in range(num_steps):
        moved = found - lengths[:, None] * (inverse @ gradient.T.contiguous()).T
        at_moved = objective(moved)[1]
        at_norms = at_moved.norm(dim=1)
        better = at_norms < norms  # never so where it is not finite
        found = torch.where(better[:, None], moved, found)
        gradient = torch.where(better[:, None], at_moved, gradient)
        norms = torch.where(better, at_norms, norms)
        lengths = torch.where(better, (2 * lengths).clamp(max=1.0), lengths / 4)
    return found, norms / first.clamp(min=torch.finfo(first.dtype).tiny)
