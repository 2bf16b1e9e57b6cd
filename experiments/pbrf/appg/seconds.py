"""What a step of CG and of LiSSA costs against N, and the score matrix by either side (the s_test trick)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from curvlab.curvature import GaussNewtonOperator
from curvlab.influence import directional_derivatives, per_example_gradients
from curvlab.lab import unit
from curvlab.linalg import identity
from curvlab.solvers import ConjugateGradient
from experiments.pbrf.appg.systems import NetworkSystems
from experiments.pbrf.networks import Network
from experiments.shared.gauges import work_clock


def step_rows(systems: NetworkSystems) -> list[dict[str, Any]]:
    """Return operations and milliseconds of a product of the whole data ("CG") and of a batch ("LiSSA"), by N.

    N examples are the training set over and over: what a product costs does not depend on their values. Operations
    are the floating-point ones that PyTorch counts of matrix products and convolutions while the step runs.
    """
    network = systems.task
    settings = network.settings.step_time
    rows: list[dict[str, Any]] = []
    for size in settings.num_examples:
        key = {"num_examples": size, "num_repeats": settings.num_repeats, "batch_size": settings.batch_size}
        key |= {"threads": torch.get_num_threads()}
        found = _step_cost(network, systems.right_hand_sides[:, :1], **key)
        for step, cost in found.items():
            own = {"task": network.label, "step": step, "N": size, "operations": cost["operations"]}
            rows += [own | {"repeat": r, "milliseconds": 1e3 * each} for r, each in enumerate(cost["seconds"])]
    return rows


def s_test_rows(systems: NetworkSystems) -> list[dict[str, Any]]:
    """Return one row for each N_test: seconds and products by either side, and how far the scores are apart."""
    network = systems.task
    settings = network.settings.s_test
    key = {"damping": systems.damping, "threads": torch.get_num_threads()}
    key |= {name: settings[name] for name in ("num_points", "rtol", "chunk_size", "num_test")}
    found = _both_sides(network, systems, **key)
    return [{"task": network.label, "seed": network.seed} | row for row in found["rows"]]


def seconds_of(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Return CPU seconds of this process (on a GPU elapsed seconds) and what `work` gives."""
    clock = work_clock(device)
    start, found = clock(), work()
    return clock() - start, found


@unit("pbrf/appg_step_seconds", version=2, about="cost of a step, {seed_name}, N = {num_examples}")
def _step_cost(network: Network, vector: Tensor, /, *, num_examples: int, **_: Any) -> dict[str, dict[str, Any]]:
    settings = network.settings.step_time
    inputs, targets = network.train
    places = torch.arange(num_examples, device=targets.device) % len(targets)
    matrix = GaussNewtonOperator(network.model, network.loss, (inputs[places], targets[places]))
    generator = network.run.generator("pbrf appg step", network.settings.seed_name)
    steps: dict[str, Callable[[], Tensor]] = {
        "CG": lambda: matrix @ vector,
        "LiSSA": lambda: matrix.sample(settings.batch_size, generator) @ vector,
    }
    found: dict[str, dict[str, Any]] = {}
    for name, step in steps.items():
        with FlopCounterMode(display=False) as counter:
            step()  # not timed: what PyTorch loads for a first product is no step's
        # A step of a batch is short beside the clock's resolution: several are taken together.
        calls = settings.calls[name]
        together = partial(_repeated, step, calls)
        seconds = [seconds_of(together, network.run.device)[0] / calls for _ in range(settings.num_repeats)]
        found[name] = {"operations": counter.get_total_flops(), "seconds": seconds}
    return found


def _repeated(step: Callable[[], Any], calls: int) -> None:
    for _ in range(calls):
        step()


@unit("pbrf/appg_s_test", version=1, about="scores by either side, {seed_name}, seed {network_seed}")
def _both_sides(_: Network, systems: NetworkSystems, /, **_key: Any) -> dict[str, Any]:
    """Solve for all training points, and for the first N_test test points, and compare scores and seconds."""
    network, settings = systems.in_double_precision().task, systems.task.settings.s_test
    matrix = GaussNewtonOperator(network.model, network.loss, network.train)
    operator = matrix + systems.damping * identity
    solver = ConjugateGradient(settings.rtol)

    def first(data: tuple[Tensor, Tensor], num: int) -> tuple[Tensor, Tensor]:
        return data[0][:num], data[1][:num]

    def scores(solved: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        """Return scores (num other, num solved), and the products."""
        columns, count = [], 0
        for inputs, targets in zip(*(part.split(settings.chunk_size) for part in solved), strict=True):
            gradients = per_example_gradients(network.model, network.loss, (inputs, targets)).T.contiguous()
            solution = solver.solve(operator, gradients)
            count += solution.num_matvecs
            columns.append(-directional_derivatives(network.model, network.loss, other, solution.x))
        return torch.cat(columns, dim=1), count

    points, device, rows = first(network.train, settings.num_points), network.run.device, []
    operator @ systems.in_double_precision().right_hand_sides[:, :1]  # as in _step_cost
    most = first(network.test, max(settings.num_test))
    by_train_seconds, (by_train, train_products) = seconds_of(partial(scores, points, most), device)
    for num in settings.num_test:
        some = first(network.test, num)
        seconds, (by_test, products) = seconds_of(partial(scores, some, points), device)
        apart = (by_test.T - by_train[:num]).abs().max() / by_train[:num].abs().max()
        rows.append(
            {
                "N": len(points[1]),
                "N_test": num,
                "seconds by training points": by_train_seconds,
                "seconds by s_test": seconds,
                "products by training points": train_products,
                "products by s_test": products,
                "largest relative difference": float(apart),
            }
        )
        network.run.add_matvecs(products)
    network.run.add_matvecs(train_products)
    return {"rows": rows}
