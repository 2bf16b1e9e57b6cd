"""The scores that are compared, all of one sign and unit."""

from __future__ import annotations

import os
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
from curvlab.linalg import LinearOperator, identity
from curvlab.solvers import Ekfac, Nystrom
from experiments.benchmarks.attribution.libraries.process import measure, stored_network
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


def methods(network: Network, trained: Trained, subsets: Tensor) -> Iterator[Method]:
    """Yield every method of the config, for one network and the subsets (S, N) that it is to predict."""
    yield from own_scores(network, trained)
    orders = network.settings.num_orders
    if orders > 1:
        yield Method.of(UNROLLED_ORDERS, partial(_unrolled_over_orders, network), num_orders=orders)
    yield from _bregman(network, trained, subsets)
    yield from peers(network, trained)


def own_scores(network: Network, trained: Trained) -> Iterator[Method]:
    """Yield what this library scores with, at every damping of the config."""
    settings, arguments = network.settings, (trained.model, network.loss, network.train, network.test)
    yield Method.of(DOT, lambda: _dots(network, trained, cosine=False))
    yield Method.of(COSINE, lambda: _dots(network, trained, cosine=True))
    rtol = float(settings.rtol)
    for damping in settings.dampings:
        scores = partial(influence_scores, *arguments, damping=damping, rtol=rtol)
        yield Method.of(INFLUENCE, scores, damping, rtol=rtol)
    by_run = partial(influence_scores, *arguments, run=trained.length, rtol=rtol)
    yield Method.of(RUN_DAMPING, by_run, rtol=rtol)
    yield Method.of(FILTER, partial(by_run, filtered=True), rtol=rtol)
    size = {"max_size": settings.ekfac_max_size} if settings.ekfac_max_size else {}
    for damping in grid_of(settings, "damping"):
        yield Method.of(EKFAC, partial(_ekfac, network, trained, damping, **size), damping, **size)
    parts = dict(settings.segments)
    source = partial(segment_response, *arguments, run=trained.run, rtol=rtol, **parts)
    yield Method.of(SEGMENTS, lambda: source().scores, **parts)
    yield Method.of(UNROLLED, lambda: unrolled_response(*arguments, run=trained.run).scores)


def grid_of(settings: DictConfig, option: str) -> list[float]:
    """Return what an option takes: the dampings of every EK-FAC, or the ridges of TRAK, in a unit of their own.

    Of EK-FAC there may be others than of exact influence, which takes longer at a small one.
    """
    grids = {"damping": settings.ekfac_dampings or settings.dampings, "lambda_reg": settings.get("ridges")}
    return list(grids[option])


def _bregman(network: Network, trained: Trained, subsets: Tensor) -> Iterator[Method]:
    settings = network.settings
    key = dict(settings.responses)
    by_run = ProximalBregmanResponses(network, trained, trained.length.damping)
    yield Method(PBRF, None, key, by_run.scores)
    if settings.pbrf_at_paper_damping:
        paper = ProximalBregmanResponses(network, trained, float(settings.paper_damping))
        yield Method(PBRF_PAPER, float(settings.paper_damping), key, paper.scores)
    yield Method(PBRF_HALVES, None, key | {"num_subsets": len(subsets)}, partial(by_run.of_subsets, subsets))


def _dots(network: Network, trained: Trained, *, cosine: bool) -> Tensor:
    test, points = (
        per_example_gradients(trained.model, network.loss, data) for data in (network.test, network.train)
    )
    if cosine:
        test, points = (nn.functional.normalize(gradients) for gradients in (test, points))
    return -test @ points.T


def _ekfac(network: Network, trained: Trained, damping: float, **recipe: Any) -> Tensor:
    operator = GaussNewtonOperator(trained.model, network.loss, network.train) + damping * identity
    generator = network.run.generator("ekfac", network.settings.seed_name)
    inverse, _ = Ekfac(**recipe).build(operator, generator=generator)
    test, points = (
        per_example_gradients(trained.model, network.loss, data) for data in (network.test, network.train)
    )
    return -(inverse @ test.T.contiguous()).T @ points.T


def _unrolled_over_orders(network: Network) -> Tensor:
    """Return the mean of the unrolled scores of trainings in orders that are never judged, as many as are."""
    each = []
    for order in range(network.settings.num_orders, 2 * network.settings.num_orders):
        trained = network.trained(order)
        arguments = (trained.model, network.loss, network.train, network.test)
        each.append(unrolled_response(*arguments, run=trained.run).scores)
    return torch.stack(each).mean(0)


# ----------------------------------------------------------------------------------------- peers
def peers(network: Network, trained: Trained) -> Iterator[Method]:
    """Yield the public libraries' scores; `networks`: of as many others, from seeds by which nothing is judged."""
    settings = network.settings
    # Where the peers' Python lies belongs to a machine, not to a result.
    python = settings.peers_python or os.environ.get("CURVLAB_PEERS_PYTHON") or None
    limits = {"time_limit": settings.time_limit, "memory_limit": settings.memory_limit}
    for name, options in settings.peers.items():
        asked = {key: value for key, value in options.items() if key not in ("grid", "networks")}
        # `grid`: of which option; null: none; "run": the run's damping.
        alone: dict[str | None, list[Any]] = {None: [None], "run": [trained.length.damping]}
        for value in alone.get(options.grid) or grid_of(settings, options.grid):
            own = asked | ({"lambda_reg": float(value)} if options.grid == "lambda_reg" else {})
            key = limits | {"options": own, "peers": python is not None}
            stored = stored_network(trained.model, settings, network.train, network.test)
            stored["damping"] = float(value) if options.grid in ("damping", "run") else 0.0
            own = own | {"num_threads": 1, "repeat_below": REPEAT_BELOW}
            compute = partial(measure, stored, own, peers_python=python, **limits)
            if options.get("networks"):
                key |= {"networks": options.networks}
                compute = partial(_of_others, network, int(options.networks), stored, compute)
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
        network: data and settings, see `responses` in conf/benchmarks/attribution.yaml.
        trained: θ^s.
        damping: λ of the proximity term.
    """

    def __init__(self, network: Network, trained: Trained, damping: float) -> None:
        self.network, self.model, self.damping = network, trained.model, damping
        self.settings = network.settings.responses
        self._of: dict[str, float] = {"damping": damping, "l2": trained.length.weight_decay}

    def scores(self) -> dict[str, Any]:
        """Return (M, N) scores, -N times the change of a test loss when an example is left out, and their quality.

        Quality: the gradient norm of the objective over that at θ^s, median and 90 % quantile over examples. The
        response of an example whose objective has no minimum nearby stays where its gradient was smallest.
        """
        num_train = self.network.num_train
        parts = [
            self._part(f"examples {int(some[0])} and on", list(some[:, None]), LeftOut)
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
            self._part(f"subsets {start} and on", left_out[start : start + at_once], SubsetsAlone)
            for start in range(0, len(left_out), at_once)
        ]
        return self._gathered(parts) | {"predicted": torch.cat([part["changes"] for part in parts], dim=1).T}

    def _part(self, name: str, groups: list[Tensor], kind: type[LeftOut]) -> dict[str, Any]:
        # The groups follow from what identifies the network and from the part's name.
        key = self.network.key | {
            "num_queries": self.network.settings.num_queries,
            "num_subsets": self.network.settings.num_subsets,
            "damping": self.damping,
            "part": name,
            "responses": dict(self.settings),
        }
        about = f"PBRF of {self.network.label}, {name}"
        steps = self.settings.num_steps if kind is LeftOut else self.settings.num_steps_of_subsets
        compute = partial(self._responses, groups, kind, steps)
        return self.network.run.unit("attribution/pbrf", key, compute, version=1, about=about)

    def _responses(self, groups: list[Tensor], kind: type[LeftOut], num_steps: int) -> dict[str, Any]:
        clock, network = work_clock(self.network.run.device), self.network
        start = clock()
        left_out = kind(self.model, network.loss, network.train, groups, **self._of)
        objective = ProximalBregmanCost(left_out)
        displacement, norms = near_minimum(
            partial(objective, indices=torch.arange(network.num_train, device=left_out.base.device)),
            torch.zeros(len(groups), len(left_out.base)).to(left_out.base),
            inverse=self._inverse,
            num_steps=num_steps,
        )
        # In float64: a test loss changes in its last digits.
        columns = displacement.T.double().contiguous()
        changes = loss_response(self.model, network.loss, network.test, columns, epsilon=1.0)
        return {"changes": changes.cpu(), "gradient_norm": norms.cpu(), "seconds": clock() - start}

    @cached_property
    def _inverse(self) -> LinearOperator:
        """Approximates (G + (λ + l2) I)⁻¹ at θ^s."""
        nobody = LeftOut(self.model, self.network.loss, self.network.train, [], **self._of)
        generator = self.network.run.generator("PBRF", self.network.settings.seed_name)
        operator = curvature_operator(nobody, "gauss_newton")
        return Nystrom(self.settings.rank).build(operator, generator=generator)[0]

    def _gathered(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        norms = torch.cat([part["gradient_norm"] for part in parts]).double()
        return {
            "status": "done",
            "cpu_seconds": sum(part["seconds"] for part in parts),
            "gradient_norm": float(norms.quantile(0.5)),
            "gradient_norm_90": float(norms.quantile(0.9)),
        }


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
