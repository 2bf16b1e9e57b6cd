"""Run by forked_checks.py: what processes compute from shares of the data, against one that has all (float64)."""

from __future__ import annotations

from pathlib import Path

import torch
from problems import (
    LOSS,
    classifier,
    close,
    language_model,
    loss_gradient,
    refused,
    same_on_all,
    seeded,
    sequences,
    uneven,
)
from torch import Tensor, nn

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator
from curvlab.influence import influence
from curvlab.influence.derivatives import per_example_gradients
from curvlab.iterate import Checkpoint
from curvlab.linalg import LinearOperator, identity
from curvlab.parallel import DataParallelOperator, Ranks
from curvlab.problem import mean_gradient
from curvlab.sampling import ChainsState, estimate_llc
from curvlab.solvers import BlockConjugateGradient, ConjugateGradient, Lissa, MinimumResidual
from curvlab.solvers.preconditioners import plan_rows
from curvlab.spectrum import hutchinson_trace, mean_eigenvalue, sketch_eigenvalues, top_eigenvalues


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
            close(found, whole @ vectors, f"{name} of a {family}")
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
        Lissa.auto(spread, 0.1, sampling="uniform", generator=seeded(1)),
    ]
    assert Lissa.auto(whole, 0.1, sampling="uniform", generator=seeded(1)).batch_size == solvers[-1].batch_size
    for solver in solvers:
        found, expected = (solver.solve(op + 0.1 * identity, sides, generator=seeded(9)) for op in (spread, whole))
        close(found.x, expected.x, type(solver).__name__)
        assert found.num_matvecs == expected.num_matvecs
    hessian, shared = HessianOperator(model, LOSS, data), DataParallelOperator(HessianOperator(model, LOSS, share))
    found, expected = (
        MinimumResidual(rtol=1e-3).solve(o + 0.5 * identity, sides[:, 0]) for o in (shared, hessian)
    )
    close(found.x, expected.x, "the Hessian's system")
    estimates = {
        "trace": lambda op: torch.tensor(hutchinson_trace(op, num_matvecs=5, generator=seeded()).value),
        "eigenvalues": lambda op: top_eigenvalues(op, 3, generator=seeded()).values,
        "sketch": lambda op: sketch_eigenvalues(op, 2, sketch_size=6, generator=seeded()).values,
        "forms": lambda op: torch.tensor(
            mean_eigenvalue(op, num_probes=4, batch_size=5, generator=seeded()).value
        ),
    }
    for name, estimate in estimates.items():
        close(estimate(spread), estimate(whole), name)


def check_influence(ranks: Ranks, folder: Path) -> None:
    def over(model: nn.Module, data: tuple[Tensor, Tensor]) -> DataParallelOperator:
        return DataParallelOperator(GaussNewtonOperator(model, LOSS, uneven(ranks, data)))

    model, data = classifier()
    test = (data[0][:4], data[1][:4])
    settings = {"damping": 0.1, "solver": ConjugateGradient(rtol=1e-3)}
    found = influence(over(model, data), test=test, **settings)
    close(found.scores, influence(model, LOSS, data, test, **settings).scores, "influence")
    same_on_all(ranks, found.scores, "influence")
    sure = torch.cat([data[0][:4], 100 * data[0][4:]]), data[1]  # the first hold the curvature
    torch.manual_seed(3)
    linear = nn.Linear(5, 3).double().eval()
    plan = plan_rows(GaussNewtonOperator(linear, LOSS, sure) + 0.1 * identity, 4, rtol=1e-3, memory_budget=2**30)
    assert plan is not None
    assert plan.num_rows > 0
    found = influence(over(linear, sure), test=test, damping=0.1, rtol=1e-3)
    expected = influence(linear, LOSS, sure, test, damping=0.1, rtol=1e-3)
    close(found.scores, expected.scores, "influence by the default solver")
    assert found.solution.num_matvecs == expected.solution.num_matvecs, "it looks at the examples of all ranks"
    weights = torch.rand(len(data[0]), generator=seeded(7), dtype=torch.float64)
    own = uneven(ranks, (weights, weights))[0]
    found = influence(over(model, data), test=test, weights=own, **settings)
    expected = influence(model, LOSS, data, test, weights=weights, **settings)
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
    expected = estimate_llc(model, LOSS, data, **settings, generator=seeded(2))

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
