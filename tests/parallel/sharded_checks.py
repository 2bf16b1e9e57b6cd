"""Run by forked_checks.py: parameters and vectors cut up over the ranks, against one process (float64).

Products are finite differences, about 1e-9 from the exact ones. Solves end early: their steps are compared, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from curvlab.curvature import (
    GaussNewtonOperator,
    HessianOperator,
    has_exact_traces,
    importance_probabilities,
    output_curvatures,
)
from curvlab.influence import influence, per_example_gradients
from curvlab.iterate import Checkpoint
from curvlab.linalg import LinearOperator, identity
from curvlab.parallel import (
    DataParallelOperator,
    Ranks,
    ShardedGaussNewtonOperator,
    ShardedHessianOperator,
    shard_parameters,
)
from curvlab.problem import mean_gradient
from curvlab.solvers import BlockConjugateGradient, ConjugateGradient, Ekfac, Lissa, Nystrom, Rows
from curvlab.solvers.block_cg import BlockState
from curvlab.spectrum import sketch_eigenvalues
from tests.curvature.curvature_oracles import Memory
from tests.parallel.problems import (
    LOSS,
    VOCABULARY,
    classifier,
    close,
    close_solves,
    language_model,
    loss_gradient,
    once,
    refused,
    same_on_all,
    seeded,
    sequences,
    uneven,
)

PRODUCT = 1e-7  # relative error of a product by finite differences


def check_products(ranks: Ranks, folder: Path) -> None:
    """Products, gradients and samples of a language model; afterwards the model is as before."""
    model, data = language_model("gpt2"), sequences(7)
    whole = GaussNewtonOperator(model, LOSS, data)
    vectors = whole.randn(2, seeded(5))
    sharded = shard_parameters(language_model("gpt2"))
    op = ShardedGaussNewtonOperator(sharded, LOSS, uneven(ranks, data), batch_size=2)
    own = check_vectors(op, vectors)
    sharded(data[0]).logits.square().mean().backward()
    before = [(p.to_local().clone(), p.grad.to_local().clone()) for p in sharded.parameters()]
    close(op.cut.whole(op @ own), whole @ vectors, "a sharded Gauss-Newton product", PRODUCT)
    close(op.cut.whole(mean_gradient(op)), loss_gradient(model, data), "sharded gradient")
    expected = once(ranks, per_example_gradients, model, LOSS, data)
    close(op.cut.whole(op.example_gradients(data)), expected.T, "gradients of single examples")
    for weights in (None, torch.rand(7, generator=seeded(9))):
        batch = [o.sample(4, seeded(6), weights) @ v for o, v in ((op, own), (whole, vectors))]
        close(op.cut.whole(batch[0]), batch[1], "a sharded sample", PRODUCT)
    close(op.output_curvatures(), output_curvatures(whole), "scores of importance sampling, sharded")
    weights = importance_probabilities(op.output_curvatures(), uniform=0.1)
    drawn = [o.sample(4, seeded(6), weights) @ v for o, v in ((op, own), (whole, vectors))]
    close(op.cut.whole(drawn[0]), drawn[1], "a sharded sample by importance", PRODUCT)
    hessian = HessianOperator(model, LOSS, data)
    spread = ShardedHessianOperator(sharded, LOSS, uneven(ranks, data), batch_size=2)
    close(spread.cut.whole(spread @ own), hessian @ vectors, "a sharded Hessian's product", PRODUCT)
    # Parameters and gradients are as before, to the last bit, and FSDP2's own forward works.
    for parameter, (value, gradient) in zip(sharded.parameters(), before, strict=True):
        assert torch.equal(parameter.to_local(), value)
        assert torch.equal(parameter.grad.to_local(), gradient)
    with torch.no_grad():
        close(sharded(data[0]).logits, model(data[0]).logits, "FSDP2's forward")
    close(op.cut.whole(op @ own), whole @ vectors, "a product after a forward", PRODUCT)


def check_vectors(op: ShardedGaussNewtonOperator, vectors: Tensor) -> Tensor:
    """Random vectors do not depend on the number of ranks; return this rank's part of them."""
    assert op.shape == (len(vectors),) * 2
    own = op.randn(2, seeded(5))
    assert torch.equal(op.cut.whole(own), vectors)
    assert torch.equal(op.cut.own_part(vectors), own)
    return own


def check_float32_inside(ranks: Ranks, folder: Path) -> None:
    """The norms of a Llama compute in float32, whatever its parameters are: the step is that of float32."""
    model, data = language_model("llama", 2), sequences(7)
    whole = GaussNewtonOperator(model, LOSS, data)
    cut = shard_parameters(language_model("llama", 2))
    op = ShardedGaussNewtonOperator(cut, LOSS, uneven(ranks, data), fd_step=1e-3)
    vectors = whole.randn(1, seeded(5))
    close(op.cut.whole(op @ op.randn(1, seeded(5))), whole @ vectors, "Gauss-Newton of a Llama", 1e-3)


def check_small(ranks: Ranks, folder: Path) -> None:
    """A network so small that some ranks hold nothing of some parameters: products and a solve."""
    model, data = classifier()
    whole: LinearOperator = GaussNewtonOperator(model, LOSS, data)
    op = ShardedGaussNewtonOperator(shard_parameters(classifier()[0]), LOSS, uneven(ranks, data), batch_size=12)
    own = check_vectors(op, vectors := whole.randn(2, seeded(5)))
    close(op.cut.whole(op @ own), whole @ vectors, "a product of a small network", PRODUCT)
    batch = [o.sample(4, seeded(6)) @ v for o, v in ((op, own), (whole, vectors))]
    close(op.cut.whole(batch[0]), batch[1], "a sample of a small network", PRODUCT)
    solver = BlockConjugateGradient(rtol=1e-2)
    found, expected = (solver.solve(o + identity, v).x for o, v in ((op, own), (whole, vectors)))
    close(op.cut.whole(found), expected, "a small system")


def check_by_tensor(op: ShardedGaussNewtonOperator, model: nn.Module, whole: LinearOperator) -> None:
    """Sketches with a block for each tensor, drawn in chunks and row by row."""
    sizes = [p.numel() for p in model.parameters()]
    for settings in ({"chunk_size": 2}, {"chunk_size": 1, "memory_budget": 9 * 8 * op.num_rows}):
        found, expected = (
            sketch_eigenvalues(o, 3, sketch_size=2, tensor_sizes=sizes, generator=seeded(4), **settings)
            for o in (op + 0.1 * identity, whole + 0.1 * identity)
        )
        close(found.sketch, expected.sketch, f"a sketch by tensor, sharded, {settings}")
        close(found.values, expected.values, "its eigenvalues")


def check_solvers(ranks: Ranks, folder: Path) -> None:
    """Solvers and spectra take as many products as on one process."""
    model, data = classifier()
    whole: LinearOperator = GaussNewtonOperator(model, LOSS, data)
    sharded = shard_parameters(classifier()[0])
    op = ShardedGaussNewtonOperator(sharded, LOSS, uneven(ranks, data))
    sides = whole.randn(2, seeded(3))
    solvers = [
        ConjugateGradient(rtol=1e-2),
        BlockConjugateGradient(rtol=1e-2, preconditioner=Nystrom(4)),
        Lissa(0.2, 4, 6, raise_on_divergence=False),
    ]
    assert has_exact_traces(whole)
    assert not has_exact_traces(op)
    close_solves(ranks, op, whole, sides, solvers)
    check_by_tensor(op, model, whole)
    check_resumed(op, sides, folder / f"sharded {ranks.size}")


def check_resumed(op: ShardedGaussNewtonOperator, sides: Tensor, folder: Path) -> None:
    """A solve that ends on all ranks at its fourth step goes on after the third."""

    class Killed(Exception):
        pass

    steps: list[int] = []

    def kill(state: BlockState) -> None:
        if state.num_steps == 4:
            raise Killed

    def solve(callback: Callable[[BlockState], None] | None, **settings) -> Tensor:
        solver = BlockConjugateGradient(rtol=1e-2, callback=callback, **settings)
        return solver.solve(op + 0.03 * identity, op.cut.own_part(sides)).x

    settings = {"checkpoint": Checkpoint(folder / "solve.pt", every=1)}
    expected = solve(None)
    try:
        solve(kill, **settings)
    except Killed:
        found = solve(lambda state: steps.append(state.num_steps), **settings)
    close(op.cut.whole(found), op.cut.whole(expected), "the sharded solution that went on")
    assert steps[0] == 4, "the sharded solve began anew"


def check_influence(ranks: Ranks, folder: Path) -> None:
    """Scores of a language model, of weighted examples, of class weights and of a measurement of one's own."""

    def largest(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.amax(-1).square().mean(1) + 0 * targets.sum(1)

    data, test = sequences(6), tuple(part[-2:] for part in sequences(8))
    weights = torch.rand(6, generator=seeded(7), dtype=torch.float64)
    share, own = uneven(ranks, data), uneven(ranks, (weights, weights))[0]
    rare = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 3, VOCABULARY, dtype=torch.float64))
    model, cut = language_model("gpt2"), shard_parameters(language_model("gpt2"))
    for loss, measured, weighted in ((LOSS, {"measurement": largest}, False), (rare, {}, True)):
        settings = {"damping": 5.0, "solver": ConjugateGradient(rtol=1e-2)} | measured
        used = weights if weighted else None
        expected = once(ranks, influence, model, loss, data, test, **settings, weights=used)
        operators = [ShardedGaussNewtonOperator(cut, loss, share)]
        if loss is rare:
            operators.append(DataParallelOperator(GaussNewtonOperator(model, loss, share)))
        for op in operators:
            found = influence(op, test=test, **settings, weights=own if weighted else None)
            close(found.scores, expected.scores, f"influence, {type(op).__name__}, {list(settings)}")
            same_on_all(ranks, found.scores, "influence of a sharded model")


def check_refusals(ranks: Ranks, folder: Path) -> None:
    """What a sharded operator cannot do is refused with what to do."""
    model, data = classifier()
    share = uneven(ranks, data)
    refused(lambda: ShardedGaussNewtonOperator(model, LOSS, share), "call curvlab.parallel.shard_parameters")
    half = shard_parameters(classifier()[0].bfloat16())
    refused(
        lambda: ShardedGaussNewtonOperator(half, LOSS, share), "rounds a finite difference away: call model.float"
    )
    cut = shard_parameters(classifier()[0])
    refused(lambda: ShardedGaussNewtonOperator(cut, LOSS, share, fd_step=0.0), "fd_step must be positive")
    op = ShardedGaussNewtonOperator(cut, LOSS, share)
    refused(lambda: sketch_eigenvalues(op, sketch_size=2, tensor_sizes=[op.shape[0] - 3, 3]), "cut as they are")
    refused(op.sample(3, seeded()).output_curvatures, "not a sample of it")
    refused(op.to_dense, "take DataParallelOperator", NotImplementedError)
    refused(lambda: op.randn(1, seeded(ranks.rank)), "same seed on every rank")
    refused(lambda: op.sample(4, seeded(ranks.rank)), "same seed on every rank")
    for preconditioner in (Rows(num_rows=4), Ekfac()):
        solver = ConjugateGradient(preconditioner=preconditioner)
        right = op.randn(1, seeded())
        solve = partial(solver.solve, op + 0.1 * identity, right)
        refused(solve, r"Nystrom\(rank\) needs products only", TypeError)
    refused(lambda: Lissa.auto(op, 0.1), "sampling='uniform'", TypeError)
    scores, weights = partial(influence, op, test=data, damping=5.0), torch.ones(len(share[1]))
    refused(lambda: scores(weights=weights if ranks.is_first else weights[:-1]), "rank 1: need one weight")
    refused(lambda: scores(weights=-weights), "rank 0: weights must be finite and not negative")
    refused(lambda: scores(measurement=lambda outputs, targets: outputs.sum()), "one number for each example")


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


def check_memory(ranks: Ranks, folder: Path) -> None:
    """Parameters, and the vectors of a solve, take 1/R of the bytes, and one layer's beside it."""
    torch.manual_seed(0)
    model = Tall().double().eval()
    data = torch.randn(2 * ranks.size, 32, dtype=torch.float64), torch.arange(2 * ranks.size) % 3
    solver = ConjugateGradient(rtol=1e-3, max_steps=2)

    def peak(op: LinearOperator, b: Tensor) -> tuple[int, Tensor]:
        with Memory() as memory:
            found = solver.solve(op + 0.1 * identity, b)
        return memory.peak, found.x

    whole = GaussNewtonOperator(model, LOSS, data)
    right = whole.randn(1, seeded())[:, 0]
    before, expected = peak(whole, right)
    num_bytes = 8 * whole.shape[0]
    sharded = shard_parameters(model)
    held = sum(p.to_local().untyped_storage().nbytes() for p in sharded.parameters())
    op = ShardedGaussNewtonOperator(sharded, LOSS, ranks.share(data))
    after, found = peak(op, op.cut.own_part(right))
    close(op.cut.whole(found), expected, "the solution of a tall network")
    assert held < 1.15 * num_bytes / ranks.size, "parameters at rest"
    assert op.num_rows < 1.15 * whole.shape[0] / ranks.size, "vectors"
    if ranks.is_first:
        print(
            f"memory of {ranks.size} ranks: parameters {held / num_bytes:.2f} of the whole, a solve's vectors and "
            f"what products need {after / num_bytes:.1f} instead of {before / num_bytes:.1f} times the parameters"
        )
    # 1/R, a copy of the parameters and their gradients, and what does not shrink: about twenty buffers of one
    # layer's size (parameters, gradients, what is sent and received of them), a layer being a twelfth of the
    # parameters.
    assert after < (before + 2 * num_bytes) / ranks.size + 2 * num_bytes, f"peak {after} of {before}"
