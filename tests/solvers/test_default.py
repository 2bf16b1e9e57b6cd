import pytest
import torch
from torch import nn

from curvlab.curvature import FisherOperator, GaussNewtonOperator
from curvlab.linalg import DenseOperator, identity
from curvlab.solvers import BlockConjugateGradient, Nystrom, Rows, default_solver
from curvlab.solvers.default import rows_pay


def test_nystrom_for_several_right_hand_sides_of_a_large_matrix() -> None:
    assert default_solver(100_000, 25).preconditioner == Nystrom(100)
    assert default_solver(100_000, 1).preconditioner is None
    assert default_solver(60, 2).preconditioner is None  # a rank of 8 of 60
    assert default_solver(100_000, 25, rtol=1e-4).rtol == 1e-4
    with pytest.raises(ValueError, match="at least 1, got 10 and 0"):
        default_solver(10, 0)


def test_fewer_products_than_block_cg_alone(generator: torch.Generator) -> None:
    # Some large eigenvalues and a tail down to the damping, as in trained networks.
    eigenvalues = torch.cat([torch.logspace(0, -2, 50), torch.logspace(-2, -4, 1450)]).double()
    basis, _ = torch.linalg.qr(torch.randn(1500, 1500, generator=generator, dtype=torch.float64))
    matrix = (basis * eigenvalues) @ basis.T
    damped = DenseOperator(matrix) + 1e-4 * identity
    b = torch.randn(1500, 10, generator=generator, dtype=torch.float64)
    alone = BlockConjugateGradient().solve(damped, b)
    solution = default_solver(1500, 10).solve(damped, b, generator=generator)
    assert solution.converged
    assert solution.num_matvecs < 0.9 * alone.num_matvecs
    exact = torch.linalg.solve(matrix + 1e-4 * torch.eye(1500, dtype=torch.float64), b)
    assert float((damped @ (solution.x - exact)).norm()) <= 1e-2 * float(b.norm())


def test_small_matrices_with_more_right_hand_sides_than_rows(generator: torch.Generator) -> None:
    matrix = torch.randn(14, 14, generator=generator)
    damped = DenseOperator(matrix @ matrix.T) + 1e-3 * identity
    b = torch.randn(14, 20, generator=generator)
    for solver in (default_solver(14, 20), BlockConjugateGradient(preconditioner=Nystrom(14))):
        assert solver.solve(damped, b, generator=generator).converged


def classifier(scale: float) -> tuple[nn.Module, nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A softmax regression; a large scale makes it sure of nearly all of its 240 points."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(240, 6, generator=generator, dtype=torch.float64)
    model = nn.Linear(6, 3).double()
    with torch.no_grad():
        model.weight.copy_(scale * torch.randn(3, 6, generator=generator))
        model.bias.zero_()
    return model, nn.CrossEntropyLoss(), (inputs, torch.zeros(240, dtype=torch.long))


def test_rows_where_few_examples_hold_the_curvature(generator: torch.Generator) -> None:
    """The share of the 40 largest 1 - sum p² of 240, computed here; others as by size."""
    for scale, pays in ((30.0, True), (0.3, False)):
        model, loss, data = classifier(scale)
        scores = 1 - model(data[0]).softmax(1).square().sum(1)
        assert (float(scores.topk(40).values.sum() / scores.sum()) > 0.5) == pays
        op = GaussNewtonOperator(model, loss, data)
        chosen = default_solver(100_000, 25, operator=op + 1e-3 * identity).preconditioner
        assert chosen == (Rows() if pays else Nystrom(100))
        assert default_solver(100_000, 25).preconditioner == Nystrom(100)
    model, loss, data = classifier(30.0)
    empirical = FisherOperator(model, loss, data, kind="empirical")
    assert default_solver(100_000, 25, operator=empirical).preconditioner == Nystrom(100)
    assert default_solver(100_000, 25, operator=DenseOperator(torch.eye(4))).preconditioner == Nystrom(100)
    damped = GaussNewtonOperator(model, loss, data) + 1e-3 * identity
    b = damped.randn(3, generator)
    solution = default_solver(21, 3, operator=damped).solve(damped, b)
    assert solution.converged
    torch.testing.assert_close(damped.to_dense() @ solution.x, b, rtol=0, atol=0.02 * float(b.norm()))


def test_no_rows_where_they_do_not_apply_or_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are no examples; an indefinite output Hessian; fewer rows than a sixth of the examples."""
    model, loss, data = classifier(30.0)
    damped = GaussNewtonOperator(model, loss, data) + 1e-3 * identity
    assert rows_pay(damped)
    tokens = (data[0].reshape(24, 10, 6), data[1].reshape(24, 10))
    of_tokens = GaussNewtonOperator(model, loss, tokens)
    assert of_tokens.num_examples == 24
    assert not rows_pay(of_tokens + 1e-3 * identity)
    assert default_solver(21, 3, operator=of_tokens + 1e-3 * identity).solve(damped, damped.randn(3)).converged
    for num, pays in ((39, False), (40, True)):
        monkeypatch.setattr(Rows, "affordable", lambda self, source, num=num: num)
        assert rows_pay(damped) == pays

    def wavy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.sin().sum(1).mean()

    indefinite = GaussNewtonOperator(model, wavy, data)
    assert not indefinite.is_psd
    assert not rows_pay(indefinite + 1e-3 * identity)


@pytest.mark.parametrize("error", [TypeError, ValueError, AttributeError])
def test_a_bug_in_the_question_does_not_choose_another_solver(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(operator: GaussNewtonOperator) -> None:
        raise error("a bug")

    monkeypatch.setattr("curvlab.solvers.default.covering_layers", broken)
    model, loss, data = classifier(30.0)
    with pytest.raises(error, match="a bug"):
        default_solver(100_000, 25, operator=GaussNewtonOperator(model, loss, data) + 1e-3 * identity)
