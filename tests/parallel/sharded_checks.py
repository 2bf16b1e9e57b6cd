"""Run by launched_checks.py: parameters and vectors cut up over the ranks, against one process (float64)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from curvature_memory import Memory
from problems import (
    LOSS,
    VOCABULARY,
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

from curvlab.curvature import GaussNewtonOperator, HessianOperator, importance_probabilities, output_curvatures
from curvlab.influence import influence as influence_on_one
from curvlab.iterate import Checkpoint
from curvlab.linalg import LinearOperator, identity
from curvlab.parallel import (
    Ranks,
    ShardedGaussNewtonOperator,
    ShardedHessianOperator,
    influence,
    shard_parameters,
)
from curvlab.solvers import BlockConjugateGradient, ConjugateGradient, Lissa, MinimumResidual, Nystrom
from curvlab.solvers.block_cg import BlockState
from curvlab.spectrum import hutchinson_trace, mean_eigenvalue, sketch_eigenvalues, top_eigenvalues


def check_products(ranks: Ranks) -> None:
    """Products, gradients and samples of a Llama and a Mistral."""
    for family in ("llama", "mistral") if ranks.size == 2 else ("llama",):
        model, data = language_model(family), sequences(7)
        share = uneven(ranks, data)
        whole, hessian = GaussNewtonOperator(model, LOSS, data), HessianOperator(model, LOSS, data)
        gradient, vectors = loss_gradient(model, data), whole.randn(2, seeded(5))
        sharded = shard_parameters(language_model(family))
        op = ShardedGaussNewtonOperator(sharded, LOSS, share, batch_size=2)
        assert op.shape == whole.shape
        own = op.randn(2, seeded(5))
        assert torch.equal(op.whole(own), vectors), "random vectors depend on the number of ranks"
        assert torch.equal(op.own_part(vectors), own)
        close(op.whole(op @ own), whole @ vectors, f"sharded Gauss-Newton of a {family}")
        close(op.whole(op.gradient()), gradient, "sharded gradient")
        for weights in (None, torch.rand(7, generator=seeded(9))):
            batch = [o.sample(4, seeded(6), weights) @ v for o, v in ((op, own), (whole, vectors))]
            close(op.whole(batch[0]), batch[1], "a sharded sample")
        scores = op.output_curvatures()
        close(scores, output_curvatures(whole), "scores of importance sampling, sharded")
        weights = importance_probabilities(scores, uniform=0.1)
        drawn = [o.sample(4, seeded(6), weights) @ v for o, v in ((op, own), (whole, vectors))]
        close(op.whole(drawn[0]), drawn[1], "a sharded sample by importance")
        if family == "llama":
            check_by_tensor(op, model, whole, data)
        spread = ShardedHessianOperator(sharded, LOSS, share, batch_size=2)
        close(spread.whole(spread @ own), hessian @ vectors, f"sharded Hessian of a {family}")
        # FSDP2's own forward works as before.
        with torch.no_grad():
            close(sharded(data[0]).logits, model(data[0]).logits, "FSDP2's forward")


def check_by_tensor(
    op: ShardedGaussNewtonOperator, model: nn.Module, whole: LinearOperator, data: tuple[Tensor, Tensor]
) -> None:
    """Sketches with a block for each tensor, drawn in chunks and row by row; gradients of single examples."""
    sizes = [p.numel() for p in model.parameters()]
    for settings in ({"chunk_size": 2}, {"chunk_size": 1, "memory_budget": 9 * 8 * op.num_rows}):
        found, expected = (
            sketch_eigenvalues(o, 3, sketch_size=2, tensor_sizes=sizes, generator=seeded(4), **settings)
            for o in (op + 0.1 * identity, whole + 0.1 * identity)
        )
        close(found.sketch, expected.sketch, f"a sketch by tensor, sharded, {settings}")
        close(found.values, expected.values, "its eigenvalues")
    refused(lambda: sketch_eigenvalues(op, sketch_size=2, tensor_sizes=[op.shape[0] - 3, 3]), "cut as they are")
    for index in (0, 5):
        pair = data[0][index : index + 1], data[1][index : index + 1]
        found = op.select(torch.tensor([index])).gradient()
        close(op.whole(found), loss_gradient(model, pair), "the gradient of an example")
    chosen = op.select(torch.tensor([5, 0, 5]))
    three = tuple(part[[5, 0, 5]] for part in data)
    close(chosen.whole(chosen.gradient()), loss_gradient(model, three), "the gradient of three examples")
    refused(chosen.output_curvatures, "not a sample of it")
    refused(lambda: op.select(torch.tensor([7])), "numbers of the 7 examples")


def check_solvers(ranks: Ranks, folder: str) -> None:
    """Solvers and spectra, on a network so small that some ranks hold nothing of some parameters."""
    model, data = classifier()
    whole: LinearOperator = GaussNewtonOperator(model, LOSS, data)
    sharded = shard_parameters(classifier()[0])
    op = ShardedGaussNewtonOperator(sharded, LOSS, uneven(ranks, data), batch_size=12)
    sides = whole.randn(2, seeded(3))
    solvers = [
        ConjugateGradient(rtol=1e-8),
        BlockConjugateGradient(rtol=1e-8, preconditioner=Nystrom(4)),
        MinimumResidual(rtol=1e-8),
        Lissa(0.2, 4, 12, raise_on_divergence=False),
    ]
    for solver in solvers:
        name = type(solver).__name__
        expected = solver.solve(whole + 0.1 * identity, sides, generator=seeded(9))
        found = solver.solve(op + 0.1 * identity, op.own_part(sides), generator=seeded(9))
        close(op.whole(found.x), expected.x, name)
        close(found.residual, expected.residual, f"residual of {name}", tolerance=1e-2)  # itself 1e-8
        assert found.num_matvecs == expected.num_matvecs
    estimates: dict[str, Callable[[LinearOperator], Tensor]] = {
        "trace": lambda o: torch.tensor(hutchinson_trace(o, num_matvecs=3, generator=seeded()).value),
        "eigenvalues": lambda o: top_eigenvalues(o, 2, generator=seeded()).values,
        "sketch": lambda o: sketch_eigenvalues(o, 2, sketch_size=4, generator=seeded()).values,
        "forms": lambda o: torch.tensor(mean_eigenvalue(o, num_probes=3, batch_size=5, generator=seeded()).value),
    }
    for name, estimate in estimates.items():
        close(estimate(op), estimate(whole), f"sharded {name}")
    check_resumed(op, sides, f"{folder}/sharded {ranks.size}")


def check_resumed(op: ShardedGaussNewtonOperator, sides: Tensor, folder: str) -> None:
    """A solve that ends on all ranks at its fourth step goes on after the third."""

    class Killed(Exception):
        pass

    steps: list[int] = []

    def kill(state: BlockState) -> None:
        if state.num_steps == 4:
            raise Killed

    def solve(callback: Callable[[BlockState], object] | None, **settings) -> Tensor:
        solver = BlockConjugateGradient(rtol=1e-8, callback=callback, **settings)
        return solver.solve(op + 0.01 * identity, op.own_part(sides)).x

    settings = {"checkpoint": Checkpoint(f"{folder}/solve.pt", every=1)}
    expected = solve(None)
    try:
        solve(kill, **settings)
    except Killed:
        found = solve(lambda state: steps.append(state.num_steps), **settings)
    close(op.whole(found), op.whole(expected), "the sharded solution that went on")
    assert steps[0] == 4, "the sharded solve began anew"


def check_influence(ranks: Ranks) -> None:
    """Scores of a Llama, of weighted examples, of class weights and of a measurement of one's own."""

    def largest(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.amax(-1).square().mean(1) + 0 * targets.sum(1)

    data, test = sequences(6), tuple(part[-2:] for part in sequences(8))
    weights = torch.rand(6, generator=seeded(7), dtype=torch.float64)
    own = uneven(ranks, (weights, weights))[0]
    rare = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 3, VOCABULARY, dtype=torch.float64))
    cases = [(LOSS, {}, {}), (LOSS, {"measurement": largest}, {}), (rare, {}, {"weights": own})]
    model, cut = language_model("llama"), shard_parameters(language_model("llama"))
    for loss, measured, weighted in cases:
        settings = {"damping": 5.0, "solver": ConjugateGradient(rtol=1e-7)} | measured
        whole = {"weights": weights} if weighted else {}
        expected = influence_on_one(model, loss, data, test, **settings, **whole)
        for other in (cut, model) if loss is rare else (cut,):
            found = influence(other, loss, uneven(ranks, data), test, **settings, **weighted)
            close(found.scores, expected.scores, f"influence, {type(other).__name__}, {list(settings)}")
            same_on_all(ranks, found.scores, "influence of a sharded model")
    share = uneven(ranks, data)
    wrong = own if ranks.is_first else own[:-1]
    call = partial(influence, cut, LOSS, share, test, damping=5.0)
    refused(lambda: call(weights=wrong), "rank 1: need one weight")
    refused(lambda: call(weights=-own), "rank 0: weights must be finite and not negative")
    refused(lambda: call(measurement=lambda outputs, targets: outputs.sum()), "one number for each example")


class Tall(nn.Module):
    """Twelve layers, so that one of them is little beside all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(12)])
        self.head = nn.Linear(32, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = inputs + torch.tanh(layer(inputs))
        return self.head(inputs)


def check_memory(ranks: Ranks) -> None:
    """Parameters, and the vectors of a solve, take 1/R of the bytes, and one layer's beside it."""
    torch.manual_seed(0)
    model = Tall().double().eval()
    data = torch.randn(2 * ranks.size, 32, dtype=torch.float64), torch.arange(2 * ranks.size) % 3
    solver = ConjugateGradient(rtol=1e-3, max_steps=3)

    def peak(build: Callable[[], LinearOperator], sides: Callable[[LinearOperator], Tensor]) -> tuple[int, Tensor]:
        op = build()
        b = sides(op)
        with Memory() as memory:
            found = solver.solve(op + 0.1 * identity, b)
        return memory.peak, found.x

    whole = GaussNewtonOperator(model, LOSS, data)
    right = whole.randn(1, seeded())[:, 0]
    before, expected = peak(lambda: whole, lambda op: right)
    num_bytes = 8 * whole.shape[0]
    sharded = shard_parameters(model)
    held = sum(p.to_local().untyped_storage().nbytes() for p in sharded.parameters())
    share = ranks.share(data)
    op = ShardedGaussNewtonOperator(sharded, LOSS, share)
    after, found = peak(lambda: op, lambda op: op.own_part(right))
    close(op.whole(found), expected, "the solution of a tall network")
    assert held < 1.15 * num_bytes / ranks.size, "parameters at rest"
    assert op.num_rows < 1.15 * whole.shape[0] / ranks.size, "vectors"
    if ranks.is_first:
        print(
            f"memory of {ranks.size} ranks: parameters {held / num_bytes:.2f} of the whole, a solve's vectors and "
            f"what products need {after / num_bytes:.1f} instead of {before / num_bytes:.1f} times the parameters"
        )
    # 1/R, and what does not shrink: a dozen buffers of one layer's size (parameters, tangents, gradients, what is
    # sent and received of them), with a layer of a twelfth of the parameters.
    assert after < before / ranks.size + 1.3 * num_bytes, f"peak {after} of {before}"
