"""Weights of classes and of positive labels; logits that can be read in two ways."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator
from curvlab.influence import influence_scores
from curvlab.problem import output_loss
from curvlab.sampling import estimate_llc
from curvlab.training import MeanLoss, evaluate, train
from tests.curvature.curvature_cases import language_problem
from tests.curvature.curvature_oracles import dense_gauss_newton, dense_hessian
from tests.curvature.loss_cases import CLASSES, KNOWN, WEIGHTS, inputs, network
from tests.refusals import refuses


@pytest.fixture(params=list(KNOWN))
def known(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    return KNOWN[request.param]


@pytest.mark.parametrize("batch_size", [2, 6])
def test_products_are_those_of_the_dense_matrices_however_the_data_is_cut(known, batch_size: int) -> None:
    loss, targets = known
    model, x = network(3), inputs()
    for operator, dense in ((GaussNewtonOperator, dense_gauss_newton), (HessianOperator, dense_hessian)):
        op = operator(model, loss, (x, targets), batch_size=batch_size)
        assert_close(op.to_dense(), dense(model, loss, x, targets), rtol=1e-10, atol=1e-12)
    assert GaussNewtonOperator(model, loss, (x, targets)).is_psd


def test_derivatives_by_the_outputs_are_those_of_autograd(known) -> None:
    loss, targets = known
    closed = output_loss(loss)
    h = 3 * torch.randn(6, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    scale = 1.0 if loss.reduction == "sum" else closed.count(targets)
    h.requires_grad_()
    (expected,) = torch.autograd.grad(scale * loss(h, targets), h)
    assert_close(closed.gradient(h.detach(), targets), expected)
    assert_close(closed.per_example(h, targets).sum(), scale * loss(h, targets))
    (by_value,) = torch.autograd.grad(closed.per_example(h, targets).sum(), h)
    assert_close(by_value, expected)


def test_equal_weights_are_no_weights_and_a_common_factor_cancels(known) -> None:
    model, pair = network(3), (inputs(), CLASSES)
    plain = GaussNewtonOperator(model, nn.CrossEntropyLoss(label_smoothing=0.1), pair).to_dense()
    same = nn.CrossEntropyLoss(weight=torch.full((3,), 7.0), label_smoothing=0.1)
    assert_close(GaussNewtonOperator(model, same, pair).to_dense(), plain)


def test_samples_are_unbiased() -> None:
    """Exactly: each example is drawn as often, its samples' mean is the matrix, and larger samples are means."""
    loss, targets = KNOWN["class_weights_smoothing"]
    op = GaussNewtonOperator(network(3), loss, (inputs(), targets))

    def seeded(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    def drawn(count: int, seed: int) -> list[int]:
        return torch.randint(6, (count,), generator=seeded(seed)).tolist()

    alone = {drawn(1, seed)[0]: op.sample(1, seeded(seed)).to_dense() for seed in range(40)}
    assert sorted(alone) == list(range(6))
    assert_close(sum(alone.values()) / 6, op.to_dense())
    for seed in range(5):
        assert_close(op.sample(3, seeded(seed)).to_dense(), sum(alone[i] for i in drawn(3, seed)) / 3)


def test_tokens_are_weighted_one_by_one() -> None:
    case = language_problem("mean")
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1, 2, 0.1, 3, 1]).double())
    op = GaussNewtonOperator(case.model, loss, (case.inputs, case.targets), batch_size=2)
    assert_close(op.to_dense(), dense_gauss_newton(case.model, loss, case.inputs, case.targets))


def test_empirical_fisher_counts_an_example_as_often_as_its_weight() -> None:
    model, x = network(3), inputs()
    op = FisherOperator(model, nn.CrossEntropyLoss(weight=WEIGHTS), (x, CLASSES), kind="empirical")
    expected = 0.0
    for n, label in enumerate(CLASSES):
        value = F.cross_entropy(model(x[n : n + 1]), label[None])
        g = torch.cat([p.flatten() for p in torch.autograd.grad(value, list(model.parameters()))])
        expected = expected + WEIGHTS[label] * torch.outer(g, g)
    assert_close(op.to_dense(), expected / WEIGHTS[CLASSES].sum())


@pytest.mark.parametrize("name", ["class_weights_smoothing", "class_weights_ignored", "pos_weight"])
def test_drawn_labels_keep_the_given_ones_weights(name: str) -> None:
    loss, targets = KNOWN[name]
    model, x = network(3), inputs()
    op = FisherOperator(
        model,
        loss,
        (x.repeat(2000, 1), targets.repeat(2000, *[1] * (targets.ndim - 1))),
        kind="monte_carlo",
        generator=torch.Generator().manual_seed(0),
        batch_size=4000,
    )
    expected = dense_gauss_newton(model, loss, x, targets)
    vectors = op.randn(4, torch.Generator().manual_seed(1))
    assert float((op @ vectors - expected @ vectors).norm() / (expected @ vectors).norm()) < 0.05  # 12,000 draws
    exact = FisherOperator(model, loss, (x, targets)).to_dense()
    assert_close(exact, expected)


def test_training_and_llc_take_the_mean_that_pytorch_takes(known) -> None:
    loss, targets = known
    model = network(3)
    if loss.reduction == "sum":
        pytest.skip("training takes means")
    outputs = model(inputs())
    assert_close(MeanLoss(loss).per_example(outputs, targets).mean(), loss(outputs, targets))
    llc = estimate_llc(
        model,
        loss,
        (inputs(), targets),
        num_chains=2,
        num_draws=2,
        num_burnin_steps=0,
        step_size=1e-6,
        batch_size=3,
        generator=torch.Generator().manual_seed(0),
    )
    assert llc.initial_loss == pytest.approx(float(loss(outputs, targets)))


@pytest.mark.parametrize(
    ("loss", "targets", "message"),
    [
        (nn.CrossEntropyLoss(weight=torch.ones(4)), CLASSES, "4 class weights.*3 outputs"),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, -1, 1])), CLASSES, "not negative"),
        (nn.CrossEntropyLoss(weight=torch.zeros(3)), CLASSES, "not all 0"),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, -1, 1])), None, "pos_weight must be"),
        (nn.BCEWithLogitsLoss(weight=torch.ones(6, 1)), None, "row for each example"),
        (nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)), 2 * torch.ones(6, 3).double(), "between 0 and 1"),
    ],
)
def test_weights_that_make_no_sense_are_refused(loss: nn.Module, targets: Tensor | None, message: str) -> None:
    targets = torch.ones(6, 3).double() if targets is None else targets
    with pytest.raises(ValueError, match=message):
        GaussNewtonOperator(network(3), loss, (inputs(), targets)) @ torch.zeros(27).double()


K, N = 3, 4


class Places(nn.Module):
    """(N, 2) -> (N, C, H)."""

    def __init__(self, classes: int, places: int) -> None:
        super().__init__()
        self.linear, self.shape = nn.Linear(2, classes * places), (classes, places)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs).unflatten(1, self.shape)


@pytest.fixture
def square(generator: torch.Generator) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(N, 2, generator=generator, dtype=torch.float64)
    return Places(K, K).double().eval(), (x, torch.randint(K, (N, K), generator=generator))


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2.0, 0.5])], ids=["plain", "class weights"])
def test_what_fits_both_is_refused_everywhere(square, weight) -> None:
    model, data = square
    loss = nn.CrossEntropyLoss(weight=weight)
    settings = {"batch_size": N, "lr": 0.1, "generator": torch.Generator()}
    for call in (
        lambda: GaussNewtonOperator(model, loss, data) @ torch.ones(27, dtype=torch.float64),
        lambda: HessianOperator(model, loss, data) @ torch.ones(27, dtype=torch.float64),
        lambda: influence_scores(model, loss, data, data, damping=0.1),
        lambda: MeanLoss(loss)(model(data[0]), data[1]),
        lambda: evaluate(model, loss, data),
        lambda: train(model, loss, data, num_steps=1, **settings),
    ):
        refuses(r"read in two ways.*cross_entropy\(outputs.flatten", call)


@pytest.mark.parametrize("last", [True, False], ids=["classes last", "classes second"])
def test_the_losses_that_the_refusal_names_have_their_own_matrix(square, last: bool) -> None:
    model, data = square

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if last:
            return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
        return functional.cross_entropy(outputs, targets)

    def of_parameters(values: Tensor) -> Tensor:
        weight, bias = values[:18].view(9, 2), values[18:]
        logits = (data[0] @ weight.T + bias).view(N, K, K)
        axis = 2 if last else 1
        return -logits.log_softmax(axis).gather(axis, data[1].unsqueeze(axis)).mean()

    values = nn.utils.parameters_to_vector(model.parameters()).detach()
    dense = torch.autograd.functional.hessian(of_parameters, values)
    # The model is linear, so that its Gauss-Newton matrix is the Hessian.
    torch.testing.assert_close(GaussNewtonOperator(model, loss, data).to_dense(), dense)
    assert evaluate(model, loss, data).accuracy is None


def test_shapes_that_fit_one_reading_are_read_so(generator) -> None:
    x = torch.randn(N, 2, generator=generator, dtype=torch.float64)
    model = Places(4, K).double().eval()
    vector = torch.ones(36, dtype=torch.float64)
    last, second = torch.randint(K, (N, 4)), torch.randint(4, (N, K))
    assert (GaussNewtonOperator(model, nn.CrossEntropyLoss(), (x, last)) @ vector).isfinite().all()
    with pytest.raises(ValueError, match="classes last"):
        GaussNewtonOperator(model, nn.CrossEntropyLoss(), (x, second)) @ vector
