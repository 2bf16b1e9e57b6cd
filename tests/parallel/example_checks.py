"""Run by forked_checks.py: what is computed from single examples and layers, against one process (float64)."""

from __future__ import annotations

from pathlib import Path

import torch
from problems import (
    LOSS,
    classifier,
    close,
    convolutions,
    language_model,
    normed,
    refused,
    same_on_all,
    seeded,
    sequences,
    uneven,
)
from torch import Tensor

from curvlab.curvature import (
    GaussNewtonOperator,
    HessianOperator,
    ImportanceOperator,
    exact_traces,
    example_importance,
    output_curvatures,
    sampled_traces,
)
from curvlab.linalg import LinearOperator, identity
from curvlab.parallel import DataParallelOperator, Ranks
from curvlab.solvers import ConjugateGradient, Ekfac, Lissa, Rows

DAMPING = 0.05


def check_importance(ranks: Ranks, folder: Path) -> None:
    """Traces, the draws by them, and LiSSA with both."""
    model, data = classifier()
    whole = GaussNewtonOperator(model, LOSS, data, batch_size=4)
    spread = DataParallelOperator(GaussNewtonOperator(model, LOSS, uneven(ranks, data), batch_size=4))
    for scores in (exact_traces, output_curvatures):
        close(scores(spread), scores(whole), scores.__name__)
    found, expected = (example_importance(op) for op in (spread, whole))
    close(found.probabilities, expected.probabilities, "probabilities")
    same_on_all(ranks, found.probabilities, "probabilities")
    assert found.num_matvecs == expected.num_matvecs
    sides = whole.randn(2, seeded(1))
    solvers = [Lissa.auto(op, 0.1, sampling="importance", generator=seeded(1)) for op in (spread, whole)]
    solutions = [
        s.solve(op + 0.1 * identity, sides, generator=seeded(2))
        for s, op in zip(solvers, (spread, whole), strict=True)
    ]
    close(solutions[0].x, solutions[1].x, "Lissa by importance")
    assert solutions[0].converged == solutions[1].converged
    batches = [ImportanceOperator.by_traces(op).sample(5, seeded(4)) @ sides for op in (spread, whole)]
    close(batches[0], batches[1], "a batch by importance")


def check_estimated_importance(ranks: Ranks, folder: Path) -> None:
    """Traces of sequences are drawn by each rank for itself: unbiased, and what is solved is the same on all."""
    model, data = language_model("llama"), sequences(7)
    whole = GaussNewtonOperator(model, LOSS, data, batch_size=2)
    spread = DataParallelOperator(GaussNewtonOperator(model, LOSS, uneven(ranks, data), batch_size=2))
    exact, spread_out = (sampled_traces(op, num_draws=16, generator=seeded(3)) for op in (whole, spread))
    close(spread_out, exact, "estimated traces", tolerance=0.2)
    importance = example_importance(spread, generator=seeded(1))
    same_on_all(ranks, importance.probabilities, "estimated probabilities")
    weighted = ImportanceOperator(spread, importance.probabilities)
    vectors = whole.randn(1, seeded(5))
    expected = whole.sample(4, seeded(6), importance.probabilities) @ vectors
    close(weighted.sample(4, seeded(6)) @ vectors, expected, "a batch by estimated importance")


def check_rows(ranks: Ranks, folder: Path) -> None:
    """(λI + RᵀR)⁻¹ of the longest rows: of linear layers, of convolutions, and of other parameters."""
    for name, (model, data) in {"linear": classifier(), "convolutions": convolutions(), "norm": normed()}.items():
        whole: LinearOperator = GaussNewtonOperator(model, LOSS, data, batch_size=4)
        share = uneven(ranks, data)
        spread: LinearOperator = DataParallelOperator(GaussNewtonOperator(model, LOSS, share, batch_size=4))
        sides = whole.randn(2, seeded(3))
        for rows in (Rows(num_rows=11), Rows(num_rows=11, rank=4, score="outputs"), Rows(memory_budget=10**5)):
            found, cost = rows.build(spread + DAMPING * identity)
            expected, expected_cost = rows.build(whole + DAMPING * identity)
            close(found @ sides, expected @ sides, f"rows of {name}")
            assert cost == expected_cost
            # A budget takes all: whether rows whose length is 0 to rounding are among them is left to rounding.
            assert rows.num_rows is None or found.num_example_rows == expected.num_example_rows == rows.num_rows
        solver = ConjugateGradient(rtol=1e-9, preconditioner=Rows(num_rows=20))
        solved = [solver.solve(op + DAMPING * identity, sides) for op in (spread, whole)]
        close(solved[0].x, solved[1].x, f"a system preconditioned by rows of {name}")
        assert solved[0].num_matvecs == solved[1].num_matvecs


def check_ekfac(ranks: Ranks, folder: Path) -> None:
    """Kronecker factors are means over all examples, with labels that each rank draws by a stream of its own."""
    for model, data in (classifier(), convolutions(), normed()):
        shares = [uneven(Ranks(rank, ranks.size), data) for rank in range(ranks.size)]
        spread = DataParallelOperator(GaussNewtonOperator(model, LOSS, shares[ranks.rank], batch_size=4))
        pretended = OneProcess(
            GaussNewtonOperator(model, LOSS, data),
            [GaussNewtonOperator(model, LOSS, share, batch_size=4) for share in shares],
        )
        sides = pretended.randn(2, seeded(3))
        for kind in ("corrected", "kronecker"):
            found, cost = Ekfac(kind).build(spread + DAMPING * identity, generator=seeded(8))
            expected, expected_cost = Ekfac(kind).build(pretended + DAMPING * identity, generator=seeded(8))
            close(found @ sides, expected @ sides, f"Kronecker factors, {kind}")
            assert cost == expected_cost
        same_on_all(ranks, found @ sides, "Kronecker factors")
        solver = ConjugateGradient(rtol=1e-9, preconditioner=Ekfac())
        solved = solver.solve(spread + DAMPING * identity, sides)
        plain = ConjugateGradient(rtol=1e-9).solve(pretended.whole + DAMPING * identity, sides)
        close(solved.x, plain.x, "a system preconditioned by Kronecker factors")


class OneProcess(LinearOperator):
    """The matrix of all examples in one process, whose labels are drawn share by share as the ranks draw them."""

    def __init__(self, whole: GaussNewtonOperator, shares: list[GaussNewtonOperator]) -> None:
        super().__init__(whole.shape[0], dtype=whole.dtype, device=whole.device)
        self.whole, self.shares = whole, shares
        self.parameter_slices, self.layers = whole.parameter_slices, whole.layers

    def matmat(self, vectors: Tensor) -> Tensor:
        return self.whole @ vectors

    def layer_factors(self, layers, *, generator):
        seed = int(torch.randint(2**31, (1,), generator=generator))
        for rank, share in enumerate(self.shares):
            part = share.part(divisor=self.whole.divisor)
            yield from part.layer_factors(layers, generator=seeded(seed + rank))


def check_refusals(ranks: Ranks, folder: Path) -> None:
    """Messages say what to take instead."""
    model, data = classifier()
    share = uneven(ranks, data)
    hessian = DataParallelOperator(HessianOperator(model, LOSS, share))
    refused(lambda: exact_traces(hessian), "pass a GaussNewtonOperator", TypeError)
    spread = DataParallelOperator(GaussNewtonOperator(model, LOSS, share))
    refused(lambda: exact_traces(spread.sample(3, seeded())), "not a sample")
    refused(lambda: sampled_traces(spread, generator=seeded(ranks.rank)), "same seed on every rank")
