"""What scores are used for: mislabelled examples, similarity, TF-IDF."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.curvature import GaussNewtonOperator
from curvlab.influence import (
    confident_learning_scores,
    corrupt_labels,
    cosines,
    detection_curve,
    margins,
    similarities,
)
from curvlab.influence.tf_idf import (
    BagOfWordsOperator,
    damped_inverse_product,
    document_frequencies,
    influence_similarity,
    tf_idf_similarity,
    word_probabilities,
)
from curvlab.linalg import DenseOperator, identity
from curvlab.solvers import BlockConjugateGradient, ConjugateGradient, Direct, Lissa
from tests.influence.gradients import gradient_rows
from tests.refusals import refuses


def test_a_fraction_of_the_labels_is_wrong_and_the_rest_as_they_were(generator) -> None:
    labels = torch.randint(0, 5, (2000,), generator=generator)
    found = corrupt_labels(labels, num_classes=5, fraction=0.3, generator=generator)
    assert int(found.mislabelled.sum()) == 600
    assert torch.equal(found.labels != labels, found.mislabelled)
    # Uniform over the four other classes: 150 each, with a standard deviation of 11.
    shifts = ((found.labels - labels) % 5)[found.mislabelled].bincount(minlength=5)
    assert shifts[0] == 0
    assert (shifts[1:] - 150).abs().max() < 45
    assert found.labels.unique().tolist() == [0, 1, 2, 3, 4]
    for fraction, classes in ((0.0, 3), (1.0, 3), (0.01, 3), (0.5, 1)):  # nothing to corrupt
        settings = {"num_classes": classes, "fraction": fraction, "generator": generator}
        refuses("at least", corrupt_labels, torch.zeros(10).long(), **settings)


def test_results_print_no_tensor_and_a_seed_is_a_generator() -> None:
    labels = torch.arange(40) % 4
    first, again = (corrupt_labels(labels, num_classes=4, fraction=0.25, generator=7) for _ in range(2))
    assert torch.equal(first.labels, again.labels)
    assert str(first) == "mislabelled examples 10 of 40"
    curve = str(detection_curve(first.mislabelled.double(), first.mislabelled))
    assert curve == "detection curve: area 0.875 (40% found in the first tenth of 40 examples)"


def test_curve_counts_what_is_found() -> None:
    scores = torch.tensor([0.1, 0.9, 0.5, 0.3, torch.inf])
    wrong = torch.tensor([True, False, False, True, True])
    curve = detection_curve(scores, wrong)
    assert curve.found.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 2 / 3, 1])
    assert curve.at(0.2) == pytest.approx(1 / 3)
    assert curve.at(0.79) == pytest.approx(1 / 3)
    assert curve.at(0.8) == pytest.approx(2 / 3)
    assert curve.area == pytest.approx((1 / 6 + 1 / 3 + 1 / 3 + 1 / 2 + 5 / 6) / 5)


def test_ties_are_the_mean_over_all_orders() -> None:
    scores, wrong = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0]), torch.tensor([False, True, False, True, True])
    orders = [[0, *middle, 4] for middle in itertools.permutations([1, 2, 3])]
    mean = sum(wrong[order].double().cumsum(0) / 3 for order in orders) / len(orders)
    torch.testing.assert_close(detection_curve(scores, wrong).found[1:], mean)


def test_area_is_the_probability_that_a_wrong_label_comes_first(generator) -> None:
    # The ROC area R relates to ours by A = f / 2 + (1 - f) R, f the share of wrong labels.
    scores, wrong = torch.randn(60, generator=generator), torch.rand(60, generator=generator) < 0.3
    pairs = (scores[wrong][:, None] > scores[~wrong]).double().mean()
    share = wrong.double().mean()
    assert detection_curve(scores, wrong).area == pytest.approx(float(share / 2 + (1 - share) * pairs))


def test_scores_without_a_place_in_an_order_are_refused() -> None:
    refuses("1 scores are nan", detection_curve, torch.tensor([0.0, torch.nan]), torch.tensor([True, False]))
    refuses("no example is mislabelled", detection_curve, torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    refuses("between 0 and 1", detection_curve(torch.zeros(2), torch.ones(2, dtype=torch.bool)).at, 1.5)


def joint_by_hand(probabilities: list[list[float]], labels: list[int], num_classes: int) -> list[bool]:
    """Off the diagonal of the confident joint (Northcutt et al. 2021, Eq. 1), example by example."""
    thresholds = []
    for j in range(num_classes):
        own = [p[j] for p, label in zip(probabilities, labels, strict=True) if label == j]
        thresholds.append(sum(own) / len(own) if own else float("inf"))
    found = []
    for p, label in zip(probabilities, labels, strict=True):
        above = [j for j in range(num_classes) if p[j] >= thresholds[j]]
        found.append(bool(above) and max(above, key=lambda j: p[j]) != label)
    return found


def test_confident_learning_puts_the_joint_first_and_orders_by_the_margin(generator) -> None:
    # fp64, and no example of class 4.
    probabilities = torch.randn(80, 5, generator=generator, dtype=torch.float64).mul(2).softmax(1)
    labels = torch.randint(0, 4, (80,), generator=generator)
    scores = confident_learning_scores(probabilities, labels)
    off = torch.tensor(joint_by_hand(probabilities.tolist(), labels.tolist(), 5))
    assert 0 < off.sum() < 80
    assert scores[off].min() > scores[~off].max()
    for group in (off, ~off):
        order = scores[group].argsort()
        assert (margins(probabilities, labels)[group][order].diff() <= 0).all()


def test_margins_by_hand_and_one_confident_mistake_is_first() -> None:
    outputs = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 7.0]])
    assert margins(outputs, torch.tensor([0, 1])).tolist() == [1.0, -2.0]
    probabilities = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.05, 0.95], [0.1, 0.9], [0.2, 0.8]])
    scores = confident_learning_scores(probabilities, torch.tensor([0, 0, 0, 1, 1]))
    assert int(scores.argmax()) == 2
    refuses("probabilities", confident_learning_scores, probabilities, torch.tensor([0, 1]))


# ------------ Similarities against dense gradients and the dense inverse, and their limits
LOSS = nn.CrossEntropyLoss()


@pytest.fixture
def problem() -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    x = torch.randn(20, 4, dtype=torch.float64, generator=generator)
    y = torch.randint(3, (20,), generator=generator)
    return model, (x, y), (x[:5], y[:5])


CG, BLOCK_CG = ConjugateGradient(rtol=1e-10), BlockConjugateGradient(rtol=1e-10)


@pytest.mark.parametrize(("solver", "columns"), [(CG, None), (BLOCK_CG, None), (BLOCK_CG, 2)])
def test_similarities_are_the_formulas_of_the_paper(problem, solver, columns) -> None:
    model, train, points = problem
    op = GaussNewtonOperator(model, LOSS, train)
    inverse = torch.linalg.inv(op.to_dense() + 0.01 * torch.eye(op.shape[0], dtype=torch.float64))
    gradients = gradient_rows(model, LOSS, points)
    result = similarities(model, LOSS, points, op + 0.01 * identity, solver=solver, columns=columns)
    for i, g in enumerate(gradients):
        for j, h in enumerate(gradients):
            expected = g @ inverse @ h / math.sqrt((g @ inverse @ g) * (h @ inverse @ h))
            assert float(result.influence[i, j]) == pytest.approx(float(expected), abs=1e-8)
            assert float(result.gradient[i, j]) == pytest.approx(float(g @ h / (g.norm() * h.norm())), abs=1e-12)
            assert float(result.influences[i, j]) == pytest.approx(float(g @ inverse @ h), rel=1e-6)
    assert result.asymmetry < 1e-8
    assert result.converged
    assert result.residual.shape == (5,)
    assert result.num_matvecs > 0


def test_an_unfinished_solution_shows_in_what_is_reported(problem) -> None:
    model, train, points = problem
    op = GaussNewtonOperator(model, LOSS, train) + 1e-4 * identity
    result = similarities(model, LOSS, points, op, solver=ConjugateGradient(rtol=1e-6, max_steps=2))
    assert not result.converged
    assert float(result.residual.max()) > 1e-3
    assert result.asymmetry > 1e-3
    assert_close(result.influence, result.influence.T)
    lines = str(result).splitlines()
    assert len(lines) == 3
    assert "not converged: allow more steps" in lines[2]
    # Much damping leaves the gradient similarity.
    op = GaussNewtonOperator(model, LOSS, train) + 1e9 * identity
    result = similarities(model, LOSS, points, op, solver=BLOCK_CG)
    assert_close(result.influence, result.gradient, rtol=0, atol=1e-6)
    assert float((result.influence - torch.eye(5, dtype=torch.float64)).abs().max()) > 0.1


def test_what_is_shared_in_directions_of_large_curvature_counts_less() -> None:
    """Two gradients e_0 + e_1 and e_0 + e_2, curvature 100 along e_0 and 1 elsewhere: closed form."""
    model = nn.Linear(3, 1, bias=False).double()
    points = torch.tensor([[1.0, 1, 0], [1, 0, 1]], dtype=torch.float64), -torch.ones(2, 1, dtype=torch.float64)
    nn.init.zeros_(model.weight)  # gradients 2 (h - y) x = 2 x
    op = DenseOperator(torch.diag(torch.tensor([100.0, 1, 1], dtype=torch.float64)), is_psd=True) + 1.0 * identity
    result = similarities(model, nn.MSELoss(), points, op, solver=BlockConjugateGradient(rtol=1e-12))
    assert float(result.gradient[0, 1]) == pytest.approx(1 / 2, abs=1e-12)
    assert float(result.influence[0, 1]) == pytest.approx((1 / 101) / (1 / 101 + 1 / 2), abs=1e-9)


def test_scale_of_a_loss_drops_out() -> None:
    products = torch.tensor([[4.0, 1.0], [1.0, 9.0]], dtype=torch.float64)
    scale = torch.diag(torch.tensor([3.0, 0.1], dtype=torch.float64))
    assert_close(cosines(scale @ products @ scale), cosines(products))
    assert float(cosines(products)[0, 1]) == pytest.approx(1 / 6)


def test_bad_input_is_refused(problem) -> None:
    refuses("all pairwise inner products", cosines, torch.ones(3, 2))
    text, middle = r"examples \[1\] have no positive product with themselves", torch.tensor([1.0, 0.0, 1.0])
    refuses(text, cosines, torch.diag(middle))
    model, train, points = problem
    diverging = Lissa(step_size=10.0, batch_size=1, num_steps=2, raise_on_divergence=False)
    op = GaussNewtonOperator(model, LOSS, train) + 1.0 * identity
    refuses("no positive product", similarities, model, LOSS, points, op, solver=diverging, generator=0)


# --- Bag-of-words influence: closed form against dense solutions and autograd, its limit, TF-IDF by hand
@pytest.fixture
def counts() -> Tensor:
    """40 documents of 25 words, with a vocabulary whose frequencies fall as 1/k."""
    generator = torch.Generator().manual_seed(0)
    shares = 1 / torch.arange(1, 61, dtype=torch.float64)
    drawn = torch.multinomial(shares, 40 * 25, replacement=True, generator=generator).reshape(40, 25)
    found = torch.stack([torch.bincount(row, minlength=60) for row in drawn]).double()
    return found[:, found.sum(0) > 0]


def dense_hessian(probabilities: Tensor) -> Tensor:
    """Return the Hessian of the mean -log p over words distributed as p, by autograd."""

    def loss(logits: Tensor) -> Tensor:
        return -(probabilities * logits.log_softmax(0)).sum()

    return torch.autograd.functional.hessian(loss, probabilities.log())


@pytest.mark.parametrize("damping", [1e-5, 1e-4, 1e-2, 1.0, 100.0])
@pytest.mark.parametrize("size", [50, 200, 1000])
def test_closed_form_agrees_with_direct(size: int, damping: float) -> None:
    shares = 1 / torch.arange(1, size + 1, dtype=torch.float64)
    probabilities = shares / shares.sum()
    b = torch.randn(size, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = Direct().solve(BagOfWordsOperator(probabilities) + damping * identity, b).x
    found = damped_inverse_product(probabilities, damping, b)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-12


def test_operator_is_the_hessian_of_the_model(counts: Tensor) -> None:
    probabilities = word_probabilities(counts)
    operator = BagOfWordsOperator(probabilities)
    torch.testing.assert_close(operator.to_dense(), dense_hessian(probabilities), rtol=1e-12, atol=1e-15)
    assert operator.is_psd
    ones = torch.ones(len(probabilities), dtype=torch.float64)
    assert float((operator @ ones).abs().max()) < 1e-15


def test_similarity_is_that_of_gradients_and_the_dense_inverse(counts: Tensor) -> None:
    probabilities, damping = word_probabilities(counts), 1e-3
    logits = probabilities.log().requires_grad_()
    rows = [
        torch.autograd.grad((row / row.sum() * logits.log_softmax(0)).sum(), logits)[0]
        for row in counts  # log p, mean over a document's words
    ]
    gradients = torch.stack(rows)
    matrix = dense_hessian(probabilities) + damping * torch.eye(len(probabilities), dtype=torch.float64)
    expected = gradients @ torch.linalg.solve(matrix, gradients.T)
    torch.testing.assert_close(influence_similarity(counts, damping), expected, rtol=1e-9, atol=1e-12)
    asked = torch.tensor([7, 2])
    some = influence_similarity(counts, damping, queries=asked)
    torch.testing.assert_close(some, expected[asked], rtol=1e-9, atol=1e-12)


def test_limit_has_a_minus_one(counts: Tensor) -> None:
    probabilities = word_probabilities(counts)
    frequencies = counts / 25
    limit = (frequencies / probabilities) @ frequencies.T - 1
    found = influence_similarity(counts, 1e-8 * float(probabilities.min()))
    torch.testing.assert_close(found, limit, rtol=1e-6, atol=1e-6)


def test_tf_idf_by_hand() -> None:
    counts = torch.tensor([[2.0, 0.0, 2.0], [1.0, 3.0, 0.0], [4.0, 0.0, 0.0]], dtype=torch.float64)
    assert document_frequencies(counts).tolist() == pytest.approx([1, 1 / 3, 1 / 3])
    root = tf_idf_similarity(counts)
    assert float(root[0, 1]) == pytest.approx(0.5 * 0.25)
    assert float(root[1, 1]) == pytest.approx(0.25**2 + 0.75**2 * 3)
    log = tf_idf_similarity(counts, idf="log", queries=torch.tensor([0]))
    assert log.shape == (1, 3)
    assert float(log[0, 0]) == pytest.approx(0.5**2 * math.log(3) ** 2)
    assert float(log[0, 2]) == 0


def test_bad_input_says_what_to_change(counts: Tensor) -> None:
    probabilities = word_probabilities(counts)
    refuses("cut them to equal length", influence_similarity, torch.cat([counts, 2 * counts]), 0.1)
    refuses("drop their columns", word_probabilities, torch.nn.functional.pad(counts, (0, 2)))
    refuses("floating-point", word_probabilities, counts.long())
    refuses("with sum 1", BagOfWordsOperator, 2 * probabilities)
    with pytest.raises(ValueError, match="'root' or 'log'"):
        tf_idf_similarity(counts, idf="square")  # type: ignore[arg-type]
