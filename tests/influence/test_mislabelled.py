"""Corrupted labels, detection curves and everyday scores, against counting by hand."""

from __future__ import annotations

import itertools

import pytest
import torch

from curvlab.influence import confident_learning_scores, corrupt_labels, detection_curve, margins


def test_a_fraction_of_the_labels_is_wrong_and_the_rest_as_they_were(generator) -> None:
    labels = torch.randint(0, 5, (2000,), generator=generator)
    found = corrupt_labels(labels, num_classes=5, fraction=0.3, generator=generator)
    assert int(found.mislabelled.sum()) == 600
    assert torch.equal(found.labels != labels, found.mislabelled)
    # Uniform over the four other classes: 150 each, with a standard deviation of 11.
    shifts = ((found.labels - labels) % 5)[found.mislabelled].bincount(minlength=5)
    assert shifts[0] == 0
    assert (shifts[1:] - 150).abs().max() < 45
    assert found.labels.min() >= 0
    assert found.labels.max() <= 4


@pytest.mark.parametrize(("fraction", "classes"), [(0.0, 3), (1.0, 3), (0.01, 3), (0.5, 1)])
def test_nothing_to_corrupt_is_an_error(generator, fraction: float, classes: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        corrupt_labels(torch.zeros(10).long(), num_classes=classes, fraction=fraction, generator=generator)


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
    with pytest.raises(ValueError, match="1 scores are nan"):
        detection_curve(torch.tensor([0.0, torch.nan]), torch.tensor([True, False]))
    with pytest.raises(ValueError, match="no example is mislabelled"):
        detection_curve(torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    with pytest.raises(ValueError, match="between 0 and 1"):
        detection_curve(torch.zeros(2), torch.ones(2, dtype=torch.bool)).at(1.5)


def test_margins_by_hand() -> None:
    outputs = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 7.0]])
    assert margins(outputs, torch.tensor([0, 1])).tolist() == [1.0, -2.0]


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


def test_one_confident_mistake_is_first() -> None:
    probabilities = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.05, 0.95], [0.1, 0.9], [0.2, 0.8]])
    scores = confident_learning_scores(probabilities, torch.tensor([0, 0, 0, 1, 1]))
    assert int(scores.argmax()) == 2
    with pytest.raises(ValueError, match="probabilities"):
        confident_learning_scores(probabilities, torch.tensor([0, 1]))
