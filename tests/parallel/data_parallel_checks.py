"""Work that ranks share: products, solvers, chains; importance, rows, factors; and how ranks end."""

from __future__ import annotations

import os
import signal
from operator import matmul
from pathlib import Path

import torch
from torch import Tensor, nn

from curvlab.curvature import (
    FisherOperator,
    GaussNewtonOperator,
    HessianOperator,
    ImportanceOperator,
    exact_traces,
    example_importance,
    output_curvatures,
    sampled_traces,
)
from curvlab.influence import influence
from curvlab.influence.derivatives import per_example_gradients
from curvlab.iterate import Checkpoint
from curvlab.linalg import LinearOperator, identity
from curvlab.parallel import DataParallelOperator, Ranks
from curvlab.problem import mean_gradient
from curvlab.sampling import ChainsState, estimate_llc
from curvlab.solvers import BlockConjugateGradient, ConjugateGradient, Ekfac, Lissa, MinimumResidual, Rows
from curvlab.solvers.block_cg import BlockState
from curvlab.solvers.preconditioners import plan_rows
from tests.parallel.problems import (
    LOSS,
    classifier,
    close,
    close_solves,
    convolutions,
    language_model,
    loss_gradient,
    normed,
    once,
    refused,
    same_on_all,
    seeded,
    sequences,
    uneven,
)


def check_products(ranks: Ranks, folder: Path) -> None:
    for family in ("llama", "mistral") if ranks.size == 2 else ("mistral",):
        model, data = language_model(family), sequences(7)
        share = uneven(ranks, data)
        kinds = {
            "Hessian": lambda d, m=model: HessianOperator(m, LOSS, d, batch_size=2),
            "empirical Fisher": lambda d, m=model: FisherOperator(m, LOSS, d, kind="empirical"),
            "Gauss-Newton": lambda d, m=model: GaussNewtonOperator(m, LOSS, d, batch_size=2),
        }
        for name, build in kinds.items():
            if family == "mistral" and name != "Gauss-Newton":
                continue
            whole, spread = build(data), DataParallelOperator(build(share))
            vectors = whole.randn(2, seeded(5))
            found = spread @ spread.randn(2, seeded(5))
            close(found, once(ranks, matmul, whole, vectors), f"{name} of a {family}")
            same_on_all(ranks, found, name)
        batch = [op.sample(4, seeded(6)) @ vectors for op in (whole, spread)]
        close(batch[1], batch[0], "a sample")
        weights = torch.rand(whole.num_examples, generator=seeded(9))
        batch = [op.sample(4, seeded(6), weights) @ vectors for op in (whole, spread)]
        close(batch[1], batch[0], "a sample by weights")
        again = [op.sample(2, seeded(7)).sample(3, seeded(8)) @ vectors for op in (whole, spread)]
        close(again[1], again[0], "a sample of a sample")
        gradient = loss_gradient(model, data)
        close(mean_gradient(spread), gradient, "the gradient")


def check_solvers(ranks: Ranks, folder: Path) -> None:
    model, data = classifier()
    share = uneven(ranks, data)
    whole: LinearOperator = GaussNewtonOperator(model, LOSS, data)
    spread: LinearOperator = DataParallelOperator(GaussNewtonOperator(model, LOSS, share))
    sides = per_example_gradients(model, LOSS, (data[0][:3], data[1][:3])).T
    solvers = [
        ConjugateGradient(rtol=1e-3),
        BlockConjugateGradient(rtol=1e-3),
        MinimumResidual(rtol=1e-3),
        Lissa(0.2, 4, 6, raise_on_divergence=False),
        Lissa.auto(spread, 1.0, sampling="uniform", generator=seeded(1)),
    ]
    assert Lissa.auto(whole, 1.0, sampling="uniform", generator=seeded(1)).batch_size == solvers[-1].batch_size
    close_solves(ranks, spread, whole, sides, solvers)
    hessian, shared = HessianOperator(model, LOSS, data), DataParallelOperator(HessianOperator(model, LOSS, share))
    found, expected = (
        MinimumResidual(rtol=1e-3).solve(o + 0.5 * identity, sides[:, 0]) for o in (shared, hessian)
    )
    close(found.x, expected.x, "the Hessian's system")


def check_influence(ranks: Ranks, folder: Path) -> None:
    def over(model: nn.Module, data: tuple[Tensor, Tensor]) -> DataParallelOperator:
        return DataParallelOperator(GaussNewtonOperator(model, LOSS, uneven(ranks, data)))

    model, data = classifier()
    test = (data[0][:4], data[1][:4])
    settings = {"damping": 0.1, "solver": ConjugateGradient(rtol=1e-3)}
    found = influence(over(model, data), test=test, **settings)
    expected = once(ranks, influence, model, LOSS, data, test, **settings)
    close(found.scores, expected.scores, "influence")
    same_on_all(ranks, found.scores, "influence")
    sure = torch.cat([data[0][:4], 100 * data[0][4:]]), data[1]  # the first hold the curvature
    torch.manual_seed(3)
    linear = nn.Linear(5, 3).double().eval()
    plan = plan_rows(GaussNewtonOperator(linear, LOSS, sure) + 0.1 * identity, 4, rtol=1e-3, memory_budget=2**30)
    assert plan is not None
    assert plan.num_rows > 0
    found = influence(over(linear, sure), test=test, damping=0.1, rtol=1e-3)
    expected = once(ranks, influence, linear, LOSS, sure, test, damping=0.1, rtol=1e-3)
    close(found.scores, expected.scores, "influence by the default solver")
    assert found.solution.num_matvecs == expected.solution.num_matvecs, "it looks at the examples of all ranks"
    weights = torch.rand(len(data[0]), generator=seeded(7), dtype=torch.float64)
    own = uneven(ranks, (weights, weights))[0]
    found = influence(over(model, data), test=test, weights=own, **settings)
    expected = once(ranks, influence, model, LOSS, data, test, weights=weights, **settings)
    close(found.scores, expected.scores, "influence of weighted examples")
    given = None if ranks.is_first else own
    refused(
        lambda: influence(over(model, data), test=test, weights=given, **settings), "pass each rank those of its"
    )
    wrong = own if ranks.is_first else own[:-1]
    refused(lambda: influence(over(model, data), test=test, weights=wrong, **settings), "rank 1: need one weight")
    refused(lambda: influence(over(model, data), LOSS, data, test, **settings), "in the place of", TypeError)


def check_chains(ranks: Ranks, folder: Path) -> None:
    model, data = classifier()
    settings = {
        "num_chains": 5, "num_draws": 6, "num_burnin_steps": 4, "step_size": 1e-3, "batch_size": 8,
    }  # fmt: skip
    expected = once(ranks, estimate_llc, model, LOSS, data, **settings, generator=seeded(2))

    def killed(state: ChainsState) -> None:
        if state.num_steps == 6:
            raise RuntimeError("killed")

    spread = settings | {"ranks": ranks, "checkpoint": Checkpoint(folder / f"chains {ranks.size}", every=1)}
    refused(
        lambda: estimate_llc(model, LOSS, data, **spread, callback=killed, generator=seeded(2)),
        "killed",
        RuntimeError,
    )
    found = estimate_llc(model, LOSS, data, **spread, generator=seeded(2))
    close(found.losses, expected.losses, "the chains' losses")
    close(found.per_chain, expected.per_chain, "LLC")


def check_refusals(ranks: Ranks, folder: Path) -> None:
    model, data = classifier()
    operator = DataParallelOperator(GaussNewtonOperator(model, LOSS, uneven(ranks, data)))
    refused(lambda: operator.randn(1, seeded(ranks.rank)), "same seed on every rank")
    refused(lambda: operator.sample(4, seeded(ranks.rank)), "same seed on every rank")
    with torch.no_grad():
        model[0].weight[0, 0] += ranks.rank
    refused(lambda: DataParallelOperator(GaussNewtonOperator(model, LOSS, data)), "load the same weights")
    pair = ranks.share(data)
    assert torch.equal(torch.cat(ranks.gather(pair[0])), data[0])


# --- Run by forked_checks.py: what is computed from single examples and layers, against one process (float64)
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
    weighted = [ImportanceOperator(op, expected.probabilities) for op in (spread, whole)]
    batches = [op.sample(5, seeded(4)) @ sides for op in weighted]
    close(batches[0], batches[1], "a batch by importance")


def check_estimated_importance(ranks: Ranks, folder: Path) -> None:
    """Traces of sequences are drawn by each rank for itself: unbiased, and what is solved is the same on all."""
    model, data = language_model("llama"), sequences(7)
    whole = GaussNewtonOperator(model, LOSS, data, batch_size=2)
    spread = DataParallelOperator(GaussNewtonOperator(model, LOSS, uneven(ranks, data), batch_size=2))
    exact = once(ranks, sampled_traces, whole, num_draws=16, generator=seeded(3))
    close(sampled_traces(spread, num_draws=16, generator=seeded(3)), exact, "estimated traces", tolerance=0.2)
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
        solver = ConjugateGradient(rtol=1e-4, preconditioner=Rows(num_rows=20))
        solved = solver.solve(spread + DAMPING * identity, sides)
        alone = once(ranks, solver.solve, whole + DAMPING * identity, sides)
        close(solved.x, alone.x, f"a system preconditioned by rows of {name}")
        assert solved.num_matvecs == alone.num_matvecs


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
    solver = ConjugateGradient(rtol=1e-9, preconditioner=Ekfac())  # of the last network, with norms
    solved = solver.solve(spread + DAMPING * identity, sides)
    plain = once(ranks, ConjugateGradient(rtol=1e-9).solve, pretended.whole + DAMPING * identity, sides)
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


def check_refusals_of_examples(ranks: Ranks, folder: Path) -> None:
    """Messages say what to take instead."""
    model, data = classifier()
    share = uneven(ranks, data)
    hessian = DataParallelOperator(HessianOperator(model, LOSS, share))
    refused(lambda: exact_traces(hessian), "pass a GaussNewtonOperator", TypeError)
    spread = DataParallelOperator(GaussNewtonOperator(model, LOSS, share))
    refused(lambda: exact_traces(spread.sample(3, seeded())), "not a sample")
    refused(lambda: sampled_traces(spread, generator=seeded(ranks.rank)), "same seed on every rank")


# --- Run by forked_checks.py: a long solve in which a rank is killed, and one that goes on before a rank fails
KILLED_AT = 3  # step


def solve(ranks: Ranks, folder: Path, *, dies_at: int = 0) -> None:
    """Solve with checkpoints; the last of the ranks is killed at a step, or the solve that was killed goes on."""
    model, data = classifier()
    whole = GaussNewtonOperator(model, LOSS, data)
    sides = whole @ whole.randn(2, seeded(3))
    steps: list[int] = []

    def callback(state: BlockState) -> None:
        steps.append(state.num_steps)
        if state.num_steps == dies_at and ranks.rank == ranks.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    solver = BlockConjugateGradient(
        rtol=1e-9, callback=callback, checkpoint=Checkpoint(folder / "long_solve.pt", every=1)
    )
    spread = DataParallelOperator(GaussNewtonOperator(model, LOSS, uneven(ranks, data)))
    found = solver.solve(spread + 0.01 * identity, sides)
    expected = once(ranks, BlockConjugateGradient(rtol=1e-9).solve, whole + 0.01 * identity, sides)
    close(found.x, expected.x, "the resumed solution")
    # The first rank saves the step before, and, where it has not heard of the end by then, that step, too.
    assert steps[0] in (KILLED_AT, KILLED_AT + 1), f"the solve went on at step {steps[0]}"


def check_killed(ranks: Ranks, folder: Path) -> None:
    solve(ranks, folder, dies_at=KILLED_AT)


def check_goes_on_and_fails(ranks: Ranks, folder: Path) -> None:
    solve(ranks, folder)
    if ranks.is_first:
        print("the solve went on", flush=True)
    ranks.sum(torch.ones(1))  # none fails before that is printed
    if ranks.rank == ranks.size - 1:
        raise ValueError("the last rank has had enough")
    ranks.sum(torch.ones(1))  # the others wait here
