"""Losses of the user's own against dense float64 matrices; what is no mean over examples is refused."""

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator
from curvlab.curvature.examples import exact_traces, sampled_traces
from curvlab.influence import influence, influence_scores, per_example_gradients
from curvlab.problem import FunctionLoss
from curvlab.sampling import estimate_llc
from curvlab.solvers import ConjugateGradient, Direct
from tests.curvature.curvature_oracles import dense_gauss_newton, dense_hessian
from tests.curvature.loss_cases import CASES, CLASSES, COUNTS, REAL, LossCase, focal, inputs, network
from tests.refusals import refuses

OPERATORS = {GaussNewtonOperator: dense_gauss_newton, HessianOperator: dense_hessian}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> LossCase:
    return CASES[request.param]


def data(case: LossCase) -> tuple[Tensor, Tensor]:
    return inputs(), case.targets


@pytest.mark.parametrize("operator", list(OPERATORS))
@pytest.mark.parametrize("columns", ["vmap", "loop"])
def test_products_are_those_of_the_dense_matrix(case: LossCase, operator, columns: str) -> None:
    if case is CASES["gaussian_checked"] and columns == "vmap" and operator is HessianOperator:
        pytest.skip("a function that branches on values has no vmap over parameters")
    model = network(case.num_outputs)
    expected = OPERATORS[operator](model, case.loss, *data(case))
    op = operator(model, case.loss, data(case), batch_size=4, columns=columns)  # 4 and 2 examples
    assert_close(op.to_dense(), expected, rtol=1e-10, atol=1e-12)


LINEAR = {
    "nll": (nn.NLLLoss(), torch.tensor([0, 2, 1, 1, 0, 2])),
    "l1": (nn.L1Loss(), torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(6, 3)),
}


@pytest.mark.parametrize("name", list(LINEAR))
def test_a_loss_that_is_linear_in_the_outputs_has_no_gauss_newton_matrix_and_says_so(name: str) -> None:
    loss, targets = LINEAR[name]
    model = nn.Sequential(network(3), nn.LogSoftmax(-1))
    with pytest.warns(UserWarning, match=f"{type(loss).__name__} is linear in the outputs .*nn.CrossEntropyLoss"):
        op = GaussNewtonOperator(model, loss, (inputs(), targets))
    assert not op.to_dense().any()
    expected = dense_hessian(model, loss, inputs(), targets)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        hessian = HessianOperator(model, loss, (inputs(), targets))
        FisherOperator(model, loss, (inputs(), targets), kind="empirical")
        GaussNewtonOperator(model, nn.HuberLoss(), (inputs(), LINEAR["l1"][1]))
    assert_close(hessian.to_dense(), expected, rtol=1e-10, atol=1e-12)


def test_is_psd_is_what_the_output_hessians_say(case: LossCase) -> None:
    op = GaussNewtonOperator(network(case.num_outputs), case.loss, data(case))
    assert op.is_psd is case.convex
    assert not HessianOperator(network(case.num_outputs), case.loss, data(case)).is_psd
    lowest = float(torch.linalg.eigvalsh(op.to_dense()).min())
    assert not case.convex or lowest > -1e-12  # positive semi-definite S make a positive semi-definite matrix


def test_is_psd_is_found_anew_when_the_parameters_have_moved() -> None:
    model = network(3)
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].bias.copy_(torch.tensor([0.0, 0.3, 0.1]))  # p about 1/3: there the focal loss is convex
    op = GaussNewtonOperator(model, focal, (inputs(), CLASSES))
    at_start = op.is_psd
    with torch.no_grad():
        model[2].bias.copy_(torch.tensor([9.0, -9.0, 0.0]))
    hessians = [
        torch.autograd.functional.hessian(lambda h, y=y: focal(h[None], y[None]), model(x).detach())
        for x, y in zip(inputs(), CLASSES, strict=True)
    ]
    lowest = min(float(torch.linalg.eigvalsh(h).min()) for h in hessians)
    assert (at_start, op.is_psd) == (True, False)
    assert lowest < -1e-6


def test_declared_convexity_is_believed_and_a_solver_needs_it() -> None:
    pair = inputs(), CLASSES
    assert GaussNewtonOperator(network(3), FunctionLoss(focal, is_psd=True), pair).is_psd
    op = GaussNewtonOperator(network(3), FunctionLoss(focal, is_psd=False), pair)
    with pytest.raises(ValueError, match="not known to be positive semi-definite"):
        ConjugateGradient().solve(op, torch.ones(op.shape[0], dtype=torch.float64))


def test_own_losses_and_gradients(case: LossCase) -> None:
    model, (x, y) = network(case.num_outputs), data(case)
    rows = []
    for n in range(len(x)):
        value = case.loss(model(x[n : n + 1]), y[n : n + 1])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()))]))
    assert_close(per_example_gradients(model, case.loss, (x, y)), torch.stack(rows))


def test_influence_is_the_dense_formula(case: LossCase) -> None:
    model, (x, y) = network(case.num_outputs), data(case)
    damping = 3.0  # above the lowest eigenvalue of those that are indefinite
    gradients = per_example_gradients(model, case.loss, (x, y))
    dense = dense_gauss_newton(model, case.loss, x, y) + damping * torch.eye(gradients.shape[1]).double()
    expected = -gradients[:2] @ torch.linalg.solve(dense, gradients.T)
    found = influence_scores(model, case.loss, (x, y), (x[:2], y[:2]), damping=damping, solver=Direct())
    assert_close(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["poisson", "huber", "focal", "gaussian", "gaussian_checked"])
def test_llc_runs_on_it(name: str) -> None:
    case = CASES[name]
    llc = estimate_llc(
        network(case.num_outputs),
        case.loss,
        data(case),
        num_chains=2,
        num_draws=3,
        num_burnin_steps=1,
        step_size=1e-5,
        batch_size=6,
        generator=torch.Generator().manual_seed(0),
    )
    assert llc.initial_loss == pytest.approx(float(case.loss(network(case.num_outputs)(inputs()), case.targets)))


def test_a_loss_whose_gradient_alone_refuses_vmap_runs_in_chains() -> None:
    """F.one_hot reads its values: vmap takes it, and vmap of a gradient does not."""
    data, model = (inputs(), torch.arange(6) % 3), network(3)
    chains = {"num_chains": 2, "num_draws": 5, "num_burnin_steps": 3, "batch_size": 4, "step_size": 1e-4}
    eye = torch.eye(3, dtype=torch.float64)
    losses = (lambda o, t: (o - F.one_hot(t, 3)).square().mean(), lambda o, t: (o - eye[t]).square().mean())
    values = [estimate_llc(model, loss, data, **chains, localization=1.0, generator=0) for loss in losses]
    assert values[0].value == pytest.approx(values[1].value)


@pytest.mark.parametrize("name", ["poisson", "soft_labels"])
def test_traces_of_single_examples(name: str) -> None:
    case = CASES[name]
    x, y = data(case)
    model = network(case.num_outputs)
    op = GaussNewtonOperator(model, case.loss, (x, y))
    expected = [float(dense_gauss_newton(model, case.loss, x[n : n + 1], y[n : n + 1]).trace()) for n in range(6)]
    assert_close(exact_traces(op), torch.tensor(expected, dtype=torch.float64))
    drawn = sampled_traces(op, num_draws=400, generator=torch.Generator().manual_seed(0))
    assert_close(drawn, exact_traces(op), rtol=0.3, atol=1e-3)


# ------------------------------------------------------------------------------------------ Fisher matrices
def test_fisher_of_counts_is_its_gauss_newton_matrix() -> None:
    """Poisson with the log rate as output is an exponential family in its natural parameter."""

    def sampler(outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        return torch.poisson(outputs.exp(), generator=generator).to(targets)

    x = inputs()[:3].repeat(2000, 1)
    y = COUNTS[:3].repeat(2000, 1)
    model = network(2)
    with torch.no_grad():
        model[2].weight.mul_(0.3)

    # A sum over outputs: with a mean over C outputs the loss is no -log p, but 1/C of it.
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.exp() - targets * outputs).sum(-1).mean()

    drawn = FisherOperator(
        model,
        FunctionLoss(loss, sample_targets=sampler),
        (x, y),
        kind="monte_carlo",
        generator=torch.Generator().manual_seed(0),
    ).to_dense()
    expected = dense_gauss_newton(model, loss, x[:3], y[:3])
    assert float((drawn - expected).norm() / expected.norm()) < 0.06  # 6,000 labels


def test_empirical_fisher_is_the_gradients_outer_products(case: LossCase) -> None:
    model = network(case.num_outputs)
    gradients = per_example_gradients(model, case.loss, data(case))
    found = FisherOperator(model, case.loss, data(case), kind="empirical")
    assert_close(found.to_dense(), gradients.T @ gradients / len(gradients))
    assert found.is_psd


def test_fishers_that_are_not_defined_are_refused() -> None:
    given = network(3), focal, (inputs(), CLASSES)
    refuses(r"exact Fisher.*GaussNewtonOperator", FisherOperator, *given, error=TypeError)
    with pytest.raises(TypeError, match=r"focal.*sample_targets"):
        FisherOperator(*given, kind="monte_carlo", generator=torch.Generator())


# ------------------------------------------------------------------------------------------ what is refused
def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def centred(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - outputs.mean(0)) ** 2).mean()


def hidden_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.huber_loss(outputs, targets, reduction="none").mean(-1).sum()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (hidden_sum, r"hidden_sum is a sum over examples.*return the mean"),
        (contrastive, r"contrastive is no mean over examples.*examples meet"),
        (centred, "centred is no mean over examples"),
        (lambda h, y: ((h - y) ** 2).mean(-1), r"returns shape \(6,\).*one number"),
        (lambda h, y: float(((h - y) ** 2).mean()), "returns float"),
        (nn.HuberLoss(reduction="sum"), r"HuberLoss has reduction='sum'.*reduction='mean'"),
        (nn.HuberLoss(reduction="none"), "reduction='none'"),
        ("huber", "a loss is a function"),
    ],
)
@pytest.mark.parametrize("operator", [*OPERATORS, FisherOperator])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_what_is_no_mean_over_examples_is_refused_at_construction(operator, loss, message, one_by_one) -> None:
    if one_by_one and loss in (contrastive, centred):
        pytest.skip("a single example repeated is what such a loss may not tell apart")
    kwargs = {"kind": "empirical"} if operator is FisherOperator else {}
    with pytest.raises((ValueError, TypeError), match=message.replace(r"\(6,", r"\([26],")):
        operator(network(2), loss, (inputs(), REAL), batch_size=1 if one_by_one else 6, **kwargs)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap
def test_a_loss_without_a_second_derivative_is_refused_with_a_way_to_write_it() -> None:
    with pytest.raises(NotImplementedError, match=r"no second derivative of MultiMarginLoss.*elementary ones"):
        influence(network(3), nn.MultiMarginLoss(), (inputs(), CLASSES), (inputs(), CLASSES), damping=0.1)


def test_class_probabilities_and_classes_on_another_axis_are_taken_as_a_function() -> None:
    model, x, soft = network(3), inputs(), F.one_hot(CLASSES, 3).to(inputs())
    hard = GaussNewtonOperator(model, nn.CrossEntropyLoss(), (x, CLASSES))
    v = hard.randn(1, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"pass a function.*cross_entropy\(outputs, targets\)"):
        GaussNewtonOperator(model, nn.CrossEntropyLoss(), (x, soft)) @ v
    assert_close(GaussNewtonOperator(model, partial(F.cross_entropy), (x, soft)) @ v, hard @ v)


def class_weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, weight=torch.tensor([0.5, 2.0, 3.0], dtype=outputs.dtype))


@pytest.mark.parametrize("operator", list(OPERATORS))
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_what_shows_in_later_batches_only_is_refused_there(operator, batch_size: int) -> None:
    """Class weights and sorted labels: as long as all are of one class, it is a plain mean."""
    x, targets = inputs(), torch.tensor([0, 0, 0, 0, 1, 2])
    alike = x[:4], targets[:4]
    op = operator(network(3), class_weighted, alike, batch_size=batch_size)
    assert_close(op.to_dense(), OPERATORS[operator](network(3), class_weighted, *alike))
    later = zip(x[4:].split(batch_size), targets[4:].split(batch_size), strict=True)
    op = operator(network(3), class_weighted, [alike, *later])
    refuses("class_weighted is no mean over examples", op.matvec, torch.ones(op.shape[0], dtype=torch.float64))


def test_targets_that_are_not_finite_are_refused_wherever_they_stand() -> None:
    targets = REAL.clone()
    targets[5, 0] = torch.nan
    op = HessianOperator(network(2), nn.HuberLoss(), (inputs(), targets), batch_size=2)
    refuses(r"HuberLoss is not finite.*rows \[1\] of 2", op.matvec, torch.ones(op.shape[0], dtype=torch.float64))


def test_huber_far_from_its_targets_has_no_curvature() -> None:
    op = GaussNewtonOperator(network(2), nn.HuberLoss(delta=1e-3), (inputs(), REAL + 100))
    assert float(op.to_dense().abs().max()) == 0
