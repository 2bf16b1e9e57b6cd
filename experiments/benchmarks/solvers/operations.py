"""Operations to the residual that is judged, counted while they run, with each preconditioner and by a peer."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from curvlab.lab import ClaimResult, ClaimSheet, Computed, Run, exact, unit
from curvlab.lab import judge as verdict
from curvlab.solvers import BlockConjugateGradient, ConjugateGradient, Solver
from experiments.benchmarks.parts import tasks_of
from experiments.benchmarks.solvers import preconditioners as by
from experiments.benchmarks.solvers.preconditioners import JUDGED, NOT_REACHED, PEER, FittedSystems, fewest


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `operations`: a row for each task and preconditioner, operations a system, and its residual."""
    rows: list[dict[str, Any]] = []
    for task in tasks_of(run, cfg, "preconditioners"):
        settings, systems = task.settings, by.fitted_systems(task.trained())
        asked = {label: {"num": settings.num_rhs} for label in by.preconditioners_of(settings)}
        asked["CG"] = {"num": settings.num_cg}
        if settings.curvlinops is not None and importlib.util.find_spec("curvlinops") is not None:
            asked[PEER] = {"num": settings.num_cg, **settings.curvlinops}
        for label, of in asked.items():
            names = {"task": task.label, "preconditioner": label, "fitted": settings.fitted}
            rows.append(names | _counted(systems, label=label, target=JUDGED, **of))
    return {"operations": pd.DataFrame(rows)} if rows else {}


@unit("preconditioners/operations", version=1, about="operations of {label} on {seed_name}")
def _counted(systems: FittedSystems, /, *, label: str, num: int, **_: Any) -> dict[str, float]:
    """Return operations for each of the first `num` systems, nan where one has not arrived, and their residual."""
    b, solve = systems.right_hand_sides[:, :num].contiguous(), _way(systems, label)
    systems.operator @ b[:, :1]  # the first product looks at an example, too: not counted
    with Operations() as counted:
        x = solve(b)
    residual = by.largest_residual(systems, x, b)
    arrived = residual <= 1.01 * JUDGED  # in single precision
    return {"operations": counted.total / num if arrived else math.nan, "residual": residual}


def _way(systems: FittedSystems, label: str) -> Callable[[Tensor], Tensor]:
    """Return what solves for some right-hand sides."""
    settings = systems.task.settings
    if label == PEER:
        inverse = by.curvlinops_inverse(systems, **settings.curvlinops)
        return lambda b: (inverse @ b).detach()
    generator = systems.task.generator("preconditioners")
    solver: Solver = ConjugateGradient(JUDGED)
    if label != "CG":
        solver = BlockConjugateGradient(JUDGED, preconditioner=by.preconditioners_of(settings)[label])
    return lambda b: solver.solve(systems.damped, b, generator=generator).x


# ------------------------------------------------------------------------------------ counting
class Operations(TorchDispatchMode):
    """Counts what PyTorch's FlopCounterMode does, and products with vectors and factorisations, too.

    By the leading terms of Golub & Van Loan (2013): an n x n Cholesky factor n³ / 3, eigenvectors 9 n³, singular
    vectors 6 m n² + 20 n³. It sets no hooks on modules, which the `autograd.grad` of curvlinops does not bear.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self._formulas = FlopCounterMode(display=False, custom_mapping=MORE).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of PyTorch, or those that it is made of, and count it."""
        kwargs, formula = kwargs or {}, self._formulas.get(func._overloadpacket)
        if formula is None and func is not torch.ops.prim.device.default:
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        out = func(*args, **kwargs)
        self.total += formula(*args, **kwargs, out_val=out) if formula else 0
        return out


def _singular_vectors(matrix: torch.Size, *_: Any, **__: Any) -> int:
    shorter = min(matrix[-2:])
    return 6 * math.prod(matrix) * shorter + 20 * math.prod(matrix[:-2]) * shorter**3


# Formulas of the arguments' shapes.
aten, prod = torch.ops.aten, math.prod
MORE: dict[Any, Any] = {
    aten.mv: lambda matrix, *_, **__: 2 * prod(matrix),
    aten.dot: lambda vector, *_, **__: 2 * prod(vector),
    aten.linalg_cholesky_ex: lambda matrix, *_, **__: prod(matrix) * matrix[-1] // 3,
    aten.cholesky_solve: lambda b, factor, *_, **__: 2 * prod(factor) * b[-1],
    aten.linalg_solve_triangular: lambda a, b, *, left=True, **_: prod(a) * (b[-1] if left else b[-2]),
    aten._linalg_eigh: lambda matrix, *_, **__: 9 * prod(matrix) * matrix[-1],
    aten._linalg_svd: _singular_vectors,
}


# ------------------------------------------------------------------------------------ claims
CLAIMS = ("operations", "peer")


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every fitted task by itself; counts are exact."""
    results: list[ClaimResult] = []
    lacking = {"operations": NOT_REACHED}
    lacking["peer"] = "curvlinops is not installed or not asked for, or one does not reach the residual."
    for task, own in computed["operations"].query("fitted").groupby("task", sort=False):
        by_rows, by_peer = own.preconditioner.str.contains("rows"), own.preconditioner == PEER
        of = (by_rows, ~(by_rows | by_peer), by_peer)
        rows, others, peer = (fewest(own[which], "operations") for which in of)
        for name, beside in zip(CLAIMS, (others, peer), strict=True):
            if rows is None or beside is None:
                results.append(claims.unjudged(name, lacking[name], of=str(task)))
                continue
            ratio = float(rows.operations / beside.operations)
            why = f"{rows.preconditioner}: {rows.operations:.3g} operations a system; "
            why += f"{beside.preconditioner}: {beside.operations:.3g}."
            claim = claims.claim(name, of=str(task))
            results.append(verdict(claim, ratio, exact(ratio), if_not_reproduced=why))
    return results
