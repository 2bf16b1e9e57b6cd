"""Run by forked_checks.py: a long solve in which a rank is killed, and one that goes on before a rank fails."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from problems import LOSS, classifier, close, seeded, uneven

from curvlab.curvature import GaussNewtonOperator
from curvlab.iterate import Checkpoint
from curvlab.linalg import identity
from curvlab.parallel import DataParallelOperator, Ranks
from curvlab.solvers import BlockConjugateGradient
from curvlab.solvers.block_cg import BlockState

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
    expected = BlockConjugateGradient(rtol=1e-9).solve(whole + 0.01 * identity, sides)
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
