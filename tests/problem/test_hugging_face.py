"""Batches that hold their labels: matrices and gradients are those of `model(**batch).loss`."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator
from curvlab.problem import mean_gradient, only_parameters
from tests.curvature.own_loss_cases import (
    CASES,
    IGNORED,
    OwnLossCase,
    bert,
    own_empirical_fisher,
    own_gauss_newton,
    own_gradient,
    own_hessian,
    sentences,
)
from tests.refusals import refuses

LOSS = nn.CrossEntropyLoss()
EXACT = {"rtol": 1e-9, "atol": 1e-12}


def check(found: Tensor, expected: Tensor, rtol: float) -> None:
    assert_close(found, expected, rtol=0, atol=rtol * float(expected.abs().max()))


def drawn(size: int) -> Tensor:
    """Three random vectors: a matrix that is wrong anywhere has wrong products with them."""
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest) -> OwnLossCase:
    return CASES[request.param]


@pytest.fixture
def model(case: OwnLossCase) -> Iterator[nn.Module]:
    model = case.model()
    with only_parameters(model, *case.patterns) as size:
        assert 20 < size < 90
        yield model


def test_every_operator_is_that_of_the_models_own_loss(case: OwnLossCase, model: nn.Module) -> None:
    batch = case.draw(5, 3, 4)
    expected = {
        GaussNewtonOperator: own_gauss_newton(model, batch, case.shift),
        HessianOperator: own_hessian(model, batch),
    }
    vectors = drawn(len(expected[HessianOperator]))
    for kind, dense in expected.items():  # all of the data, or a list of batches
        check(kind(model, LOSS, batch) @ vectors, dense @ vectors, case.rtol)
        check(kind(model, LOSS, [batch]) @ vectors[:, 0], dense @ vectors[:, 0], case.rtol)
    exact = FisherOperator(model, LOSS, [batch])
    check(exact @ vectors, expected[GaussNewtonOperator] @ vectors, case.rtol)
    empirical = FisherOperator(model, LOSS, [batch], kind="empirical")
    check(empirical @ vectors, own_empirical_fisher(model, batch, case.shift) @ vectors, case.rtol)


def test_the_gradient_is_that_of_the_models_own_loss(case: OwnLossCase, model: nn.Module) -> None:
    batch = case.draw(5, 3, 4)
    check(mean_gradient(model, LOSS, batch), own_gradient(model, batch), case.rtol)
    total = mean_gradient(model, nn.CrossEntropyLoss(reduction="sum"), [batch])
    labels = batch["labels"][:, case.shift :] if case.shift else batch["labels"]
    check(total / (labels != IGNORED).sum(), own_gradient(model, batch), case.rtol)


def test_the_mean_is_over_all_predictions_and_not_over_batches(case: OwnLossCase, model: nn.Module) -> None:
    batches = [case.draw(6, 5), case.draw(4)]
    counts = [
        int((b["labels"][:, case.shift :] != IGNORED).sum()) if case.shift else int((b["labels"] != IGNORED).sum())
        for b in batches
    ]
    own = [own_gradient(model, batch) for batch in batches]
    weighted = sum(count * gradient for count, gradient in zip(counts, own, strict=True)) / sum(counts)
    found = mean_gradient(model, LOSS, batches)
    check(found, weighted, case.rtol)
    assert (found - sum(own) / 2).norm() > 1e-2 * found.norm()  # a mean of means is another vector
    matrix = sum(c * own_gauss_newton(model, b, case.shift) for c, b in zip(counts, batches, strict=True))
    vectors = drawn(len(matrix))
    check(GaussNewtonOperator(model, LOSS, batches) @ vectors, matrix @ vectors / sum(counts), case.rtol)


def test_padding_changes_nothing(case: OwnLossCase, model: nn.Module) -> None:
    together = GaussNewtonOperator(model, LOSS, case.draw(5, 3))
    batch = case.draw(5, 3)
    columns = 3 - (5 - batch["labels"].shape[1] if batch["labels"].ndim == 2 else 0)
    short = {
        name: value[1:, : columns if name == "labels" else 3] if value.ndim == 2 else value[1:]
        for name, value in batch.items()
    }
    apart = GaussNewtonOperator(model, LOSS, [{name: value[:1] for name, value in batch.items()}, short])
    vectors = drawn(together.shape[0])
    check(together @ vectors, apart @ vectors, case.rtol)


def test_half_precision_and_the_models_state(case: OwnLossCase) -> None:
    model, batch = case.model().bfloat16(), case.draw(5, 3, 4)
    before = dict(model.config.to_dict())
    found, expected = mean_gradient(model, LOSS, batch), own_gradient(model, batch)
    assert float((found - expected).norm() / expected.norm()) < 0.05
    assert [p.grad for p in model.parameters()] == [None] * len(list(model.parameters()))
    model = case.model()
    GaussNewtonOperator(model, LOSS, batch)
    assert model.config.to_dict() | {"dtype": None} == before | {"dtype": None}


# ----------------------------------------------------------------------------- other losses and labels
def classifier(num_labels: int) -> nn.Module:
    return OwnLossCase(lambda: bert(num_labels), sentences, (), 0).model()


def test_labels_under_the_other_names_of_the_trainer() -> None:
    model = classifier(3)
    batch = sentences(4, 3)
    with only_parameters(model, "classifier.*"):
        expected = own_hessian(model, batch)
        for name in ("label", "label_ids"):
            renamed = {name if key == "labels" else key: value for key, value in batch.items()}
            assert_close(HessianOperator(model, LOSS, renamed).to_dense(), expected, **EXACT)


def test_labels_under_two_names_are_no_input() -> None:
    class Named(nn.Linear):
        def forward(self, values: Tensor) -> Tensor:
            return super().forward(values)

    model = Named(3, 2).double()
    batch = {"values": torch.eye(3, dtype=torch.float64), "labels": torch.tensor([0, 1, 1])}
    expected = HessianOperator(model, LOSS, (batch["values"], batch["labels"])).to_dense()
    both = batch | {"label": torch.zeros(3, dtype=torch.long)}  # "labels" are those that count
    assert_close(HessianOperator(model, LOSS, both).to_dense(), expected, **EXACT)


@pytest.mark.parametrize("kind", ["one number", "several labels"])
def test_floating_point_labels(kind: str) -> None:
    model = classifier(1 if kind == "one number" else 3)
    batch = sentences(4, 3)
    labels = torch.tensor([0.5, -1.0]) if kind == "one number" else torch.tensor([[0.0, 1, 1], [1, 0, 0]])
    batch["labels"] = labels.double()
    loss = nn.MSELoss() if kind == "one number" else nn.BCEWithLogitsLoss()
    with only_parameters(model, "classifier.*"):
        expected = own_hessian(model, batch)
        assert_close(HessianOperator(model, loss, [batch]).to_dense(), expected, **EXACT)
        assert_close(mean_gradient(model, loss, [batch]), own_gradient(model, batch), **EXACT)


def test_entries_that_the_model_does_not_take_are_left_out() -> None:
    model, batch = classifier(3), sentences(4, 3)
    with only_parameters(model, "classifier.*"):
        expected = HessianOperator(model, LOSS, batch).to_dense()
        more = batch | {"idx": torch.arange(2), "sentence": ["one", "two"]}
        assert_close(HessianOperator(model, LOSS, [more]).to_dense(), expected)


def test_labels_that_do_not_count_in_the_first_batch_leave_the_decision_to_the_next() -> None:
    case = CASES["gpt2"]
    model, batch = case.model(), case.draw(5, 3)
    nothing = batch | {"labels": torch.full_like(batch["labels"], IGNORED)}
    with only_parameters(model, "*.ln_f.*"):
        found = mean_gradient(model, LOSS, [nothing, batch])
        assert_close(found, own_gradient(model, batch), **EXACT)


# ----------------------------------------------------------------------------------------- other modules
class Tagger(nn.Module):
    """No model of transformers; tags its tokens, and computes a loss with or without a shift, or none."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.embedding, self.head, self.kind = nn.Embedding(7, 3), nn.Linear(3, 7), loss

    def forward(self, input_ids: Tensor, labels: Tensor | None = None):
        outputs = type("Outputs", (), {"logits": self.head(self.embedding(input_ids)), "loss": None})()
        if labels is not None and self.kind != "none":
            shift = 1 if self.kind == "shifted" else 0
            logits = outputs.logits[:, : outputs.logits.shape[1] - shift]
            outputs.loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, shift:].flatten())
            if self.kind == "scaled":
                outputs.loss = 2 * outputs.loss
        return outputs


@pytest.mark.parametrize("kind", ["shifted", "plain"])
def test_the_loss_of_an_unknown_module_decides_whether_labels_are_shifted(kind: str) -> None:
    model = Tagger(kind).double().eval()
    batch = {"input_ids": torch.tensor([[2, 4, 1], [5, 3, 3]]), "labels": torch.tensor([[1, 0, 6], [2, 2, 5]])}
    assert_close(mean_gradient(model, LOSS, [batch]), own_gradient(model, batch), **EXACT)
    assert_close(HessianOperator(model, LOSS, [batch]).to_dense(), own_hessian(model, batch), **EXACT)


@pytest.mark.parametrize(
    ("kind", "message"), [("none", "no loss of its own"), ("scaled", "own loss of the first 2")]
)
def test_what_is_not_known_is_refused(kind: str, message: str) -> None:
    batch = {"input_ids": torch.tensor([[2, 4, 1], [5, 3, 3]]), "labels": torch.tensor([[1, 0, 6], [2, 2, 5]])}
    refuses(message, GaussNewtonOperator, Tagger(kind).eval(), LOSS, [batch])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: {k: v for k, v in b.items() if k != "labels"}, "without labels"),
        (lambda b: {"labels": b["labels"]}, "without inputs"),
        (lambda b: b | {"input_ids": b["input_ids"].tolist()}, "with_format"),
        (lambda b: b | {"labels": b["labels"][:1]}, "one row for each example"),
    ],
)
def test_messages_say_what_to_change(change, message: str) -> None:
    batch = change(sentences(4, 3))
    refuses(message, GaussNewtonOperator, classifier(3), LOSS, [batch], error=(TypeError, ValueError))


def test_several_splits_are_refused() -> None:
    datasets = pytest.importorskip("datasets")
    split = datasets.Dataset.from_dict({"input_ids": [[2, 3]], "labels": [0]}).with_format("torch")
    with pytest.raises(TypeError, match="choose one"):
        GaussNewtonOperator(classifier(3), LOSS, datasets.DatasetDict(train=split, test=split))
