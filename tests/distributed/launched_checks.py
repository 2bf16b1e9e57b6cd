"""Run by torchrun: what several processes compute together, against one process with all the data (float64).

Each check is a function of the ranks that raises where the answers differ; all ranks run all of them.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import sharded_checks
import torch
from problems import LOSS, classifier, close, language_model, loss_gradient, same_on_all, seeded, sequences, uneven
from torch import Tensor

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator
from curvlab.distributed import (
    DataParallelOperator,
    Ranks,
    estimate_llc,
    influence,
    joined,
    mean_gradient,
)
from curvlab.influence import influence as influence_on_one
from curvlab.influence.example_derivatives import per_example_gradients
from curvlab.linalg import LinearOperator, identity
from curvlab.sampling import estimate_llc as llc_on_one
from curvlab.solvers import BlockConjugateGradient, ConjugateGradient, Lissa, MinimumResidual
from curvlab.spectrum import hutchinson_trace, mean_eigenvalue, sketch_eigenvalues, top_eigenvalues

KILLED_AT = 3  # step


# ------------------------------------------------------------------------------------ data parallel
def check_products(ranks: Ranks) -> None:
    for family in ("llama", "mistral") if ranks.size == 2 else ("mistral",):
        model, data = language_model(family), sequences(7)
        share = uneven(ranks, data)
        kinds = {
            "Gauss-Newton": lambda d, m=model: GaussNewtonOperator(m, LOSS, d, batch_size=2),
            "Hessian": lambda d, m=model: HessianOperator(m, LOSS, d, batch_size=2),
            "empirical Fisher": lambda d, m=model: FisherOperator(m, LOSS, d, kind="empirical"),
        }
        for name, build in kinds.items():
            if ranks.size == 2 and (family, name) == ("mistral", "Hessian"):
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
        close(mean_gradient(model, LOSS, share, batch_size=2), gradient, "the gradient")


def check_solvers(ranks: Ranks) -> None:
    model, data = classifier()
    share = uneven(ranks, data)
    whole: LinearOperator = GaussNewtonOperator(model, LOSS, data)
    spread: LinearOperator = DataParallelOperator(GaussNewtonOperator(model, LOSS, share))
    sides = per_example_gradients(model, LOSS, (data[0][:3], data[1][:3])).T
    solvers = [
        ConjugateGradient(rtol=1e-8),
        BlockConjugateGradient(rtol=1e-8),
        MinimumResidual(rtol=1e-8),
        Lissa(0.2, 4, 30, raise_on_divergence=False),
        Lissa.auto(spread, 0.1, sampling="uniform", generator=seeded(1)),
    ]
    assert Lissa.auto(whole, 0.1, sampling="uniform", generator=seeded(1)).batch_size == solvers[-1].batch_size
    for solver in solvers:
        found, expected = (solver.solve(op + 0.1 * identity, sides, generator=seeded(9)) for op in (spread, whole))
        close(found.x, expected.x, type(solver).__name__)
        assert found.num_matvecs == expected.num_matvecs
    hessian, shared = HessianOperator(model, LOSS, data), DataParallelOperator(HessianOperator(model, LOSS, share))
    found, expected = (MinimumResidual(rtol=1e-8).solve(op, sides[:, 0]) for op in (shared, hessian))
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


def check_influence(ranks: Ranks) -> None:
    model, data = classifier()
    test = (data[0][:4], data[1][:4])
    settings = {"damping": 0.1, "solver": ConjugateGradient(rtol=1e-9)}
    found = influence(model, LOSS, uneven(ranks, data), test, **settings)
    close(found.scores, influence_on_one(model, LOSS, data, test, **settings).scores, "influence")
    same_on_all(ranks, found.scores, "influence")


def check_chains(ranks: Ranks, folder: str) -> None:
    model, data = classifier()
    settings = {
        "num_chains": 5, "num_draws": 6, "num_burnin_steps": 4, "step_size": 1e-3, "batch_size": 8,
    }  # fmt: skip
    expected = llc_on_one(model, LOSS, data, **settings, generator=seeded(2))
    shorter = settings | {"num_draws": 2}
    estimate_llc(model, LOSS, data, **shorter, checkpoint=folder, checkpoint_every=1, generator=seeded(2))
    found = estimate_llc(model, LOSS, data, **settings, checkpoint=folder, generator=seeded(2))
    close(found.losses, expected.losses, "the chains' losses")
    close(found.per_chain, expected.per_chain, "LLC")


def long_solve(ranks: Ranks, folder: str, *, dies_at: int = 0) -> None:
    """Solve with checkpoints; the last of the ranks is killed at a step, or the solve that was killed goes on."""
    model, data = classifier()
    sides = per_example_gradients(model, LOSS, (data[0][:2], data[1][:2])).T
    steps: list[int] = []

    def callback(step: int, residuals: Tensor) -> None:
        steps.append(step)
        if step == dies_at and ranks.rank == ranks.size - 1:
            print(f"failing at {time.time()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    solver = BlockConjugateGradient(
        rtol=1e-9, callback=callback, checkpoint=f"{folder}/solve.pt", checkpoint_every=1
    )
    spread = DataParallelOperator(GaussNewtonOperator(model, LOSS, uneven(ranks, data)))
    found = solver.solve(spread + 0.01 * identity, sides)
    expected = BlockConjugateGradient(rtol=1e-9).solve(
        GaussNewtonOperator(model, LOSS, data) + 0.01 * identity, sides
    )
    close(found.x, expected.x, "the resumed solution")
    assert steps[0] == KILLED_AT, "the solve began anew"


def check_refusals(ranks: Ranks) -> None:
    model, data = classifier()
    operator = DataParallelOperator(GaussNewtonOperator(model, LOSS, uneven(ranks, data)))
    refused(lambda: operator.randn(1, seeded(ranks.rank)), "same seed on every rank")
    refused(lambda: operator.sample(4, seeded(ranks.rank)), "same seed on every rank")
    with torch.no_grad():
        model[0].weight[0, 0] += ranks.rank
    refused(lambda: DataParallelOperator(GaussNewtonOperator(model, LOSS, data)), "load the same weights")
    pair = ranks.share(data)
    assert torch.equal(torch.cat(ranks.gather(pair[0])), data[0])


def refused(call, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


def main(folder: str, ending: str) -> None:
    with joined(timeout_seconds=60) as ranks:
        sharded_checks.check_products(ranks)
        sharded_checks.check_solvers(ranks, folder)
        sharded_checks.check_memory(ranks)
        check_products(ranks)
        check_solvers(ranks)
        check_influence(ranks)
        check_chains(ranks, f"{folder}/chains {ranks.size}")
        check_refusals(ranks)
        if ranks.is_first:
            print("all checks passed", flush=True)
        if ending == "killed":
            long_solve(ranks, folder, dies_at=KILLED_AT)
        long_solve(ranks, folder)
        if ranks.is_first:
            print("the solve went on", flush=True)
        if ranks.rank == ranks.size - 1:
            print(f"failing at {time.time()}", flush=True)
            raise ValueError("the last rank has had enough")
        ranks.sum(torch.ones(1))  # the others wait here


if __name__ == "__main__":
    main(*sys.argv[1:])
