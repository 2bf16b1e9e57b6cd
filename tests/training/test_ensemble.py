"""K copies at once are K models one by one: their losses, gradients and trainings, in fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from curvlab.iterate import Checkpoint
from curvlab.training import Ensemble, EnsembleLosses, shuffled_batches, train, train_ensemble
from tests.refusals import refuses, stopped

FP64 = torch.float64
NUM_COPIES, NUM_EXAMPLES = 3, 20


def problem(kind: str) -> tuple[nn.Module, Any, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(3, (NUM_EXAMPLES,), generator=generator)
    if kind == "convolution":
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)).to(FP64)
        images = torch.randn(NUM_EXAMPLES, 1, 4, 4, generator=generator).double()
        return model, nn.CrossEntropyLoss(), (images, labels)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(FP64)
    inputs = torch.randn(NUM_EXAMPLES, 4, generator=generator, dtype=FP64)
    if kind == "function":
        loss = lambda outputs, targets: outputs.gather(1, targets[:, None]).square().mean()  # noqa: E731
        return model, loss, (inputs, labels)
    if kind == "squares":
        return model, nn.MSELoss(), (inputs, torch.randn(NUM_EXAMPLES, 3, generator=generator, dtype=FP64))
    return model, nn.CrossEntropyLoss(), (inputs, labels)


def at_once(kind: str = "classes", **settings: Any) -> Ensemble:
    """Train copies of a problem together: two of which every example counts, where nothing else is said."""
    usual = {"example_weights": torch.ones(2, NUM_EXAMPLES), "num_epochs": 2, "batch_size": 8, "lr": 0.1}
    return train_ensemble(*problem(kind), **usual | {"generator": 0} | settings)


def weights_of_examples() -> Tensor:
    """Every copy leaves out an example of its own, and one is weighted throughout."""
    weights = torch.ones(NUM_COPIES, NUM_EXAMPLES, dtype=FP64)
    for k in range(NUM_COPIES):
        weights[k, 2 * k] = 0.0
    weights[1] *= torch.linspace(0.5, 2.0, NUM_EXAMPLES)
    return weights


def single_loss(loss: Any, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    own = [loss(outputs[i : i + 1], targets[i : i + 1]) for i in range(len(targets))]
    return (torch.stack(own) * weights).sum() / len(targets)


@pytest.mark.parametrize("by_vmap", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["classes", "squares", "function", "convolution"])
def test_losses_and_gradients_are_those_of_separate_models(kind: str, shared: bool, by_vmap: bool) -> None:
    model, loss, (inputs, targets) = problem(kind)
    losses = EnsembleLosses(model, loss, (inputs, targets))
    generator = torch.Generator().manual_seed(2)
    positions = losses.start + 0.3 * torch.randn(NUM_COPIES, len(losses.start), generator=generator, dtype=FP64)
    indices = torch.randint(NUM_EXAMPLES, (6,) if shared else (NUM_COPIES, 6), generator=generator)
    for weights in (None, weights_of_examples()):
        chosen = None if weights is None else weights.gather(1, indices.expand(NUM_COPIES, 6))
        values, gradients = losses.losses_and_gradients(
            positions, losses.batch(indices), shared=shared, weights=chosen, by_vmap=by_vmap
        )
        for k in range(NUM_COPIES):
            vector_to_parameters(positions[k], model.parameters())
            own = indices if shared else indices[k]
            factors = torch.ones(6, dtype=FP64) if chosen is None else chosen[k]
            expected = single_loss(loss, model(inputs[own]), targets[own], factors)
            torch.testing.assert_close(values[k], expected.detach(), rtol=1e-10, atol=1e-12)
            for found, gradient in zip(
                gradients, torch.autograd.grad(expected, list(model.parameters())), strict=True
            ):
                torch.testing.assert_close(found[k], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("by_vmap", [True, False])
@pytest.mark.parametrize("settings", [{"padding_idx": 0}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str)
def test_gradients_of_embeddings_are_those_of_the_loss_unless_asked_as_trained(
    settings: dict[str, Any], by_vmap: bool
) -> None:
    data = torch.tensor([[0, 1], [2, 0], [3, 4], [5, 5], [0, 0]]), torch.arange(5) % 3
    plain, own = (
        nn.Sequential(nn.Embedding(6, 4, **kind), nn.Flatten(), nn.Linear(8, 3)) for kind in ({}, settings)
    )
    own.load_state_dict(plain.state_dict())

    def gradient(model: nn.Module, **as_trained: bool) -> torch.Tensor:
        losses = EnsembleLosses(model, nn.CrossEntropyLoss(), data, **as_trained)
        positions = losses.start.expand(3, -1).clone()
        found = losses.losses_and_gradients(positions, losses.batch(None), shared=True, by_vmap=by_vmap)
        return found[1][0][0]

    torch.testing.assert_close(gradient(own), gradient(plain))
    if "sparse" not in settings:  # such gradients are not stacked
        nn.CrossEntropyLoss()(own(data[0]), data[1]).backward()
        torch.testing.assert_close(gradient(own, as_trained=True), own[0].weight.grad)
        assert not torch.allclose(own[0].weight.grad, gradient(plain))


def test_weights_have_a_row_for_each_copy() -> None:
    losses = EnsembleLosses(*problem("classes"))
    with pytest.raises(ValueError, match=r"weights have shape \(2, 6\): one row for each of the 1 copies"):
        losses.losses_and_gradients(
            losses.start[None], losses.batch(torch.arange(6)), shared=True, weights=torch.ones(2, 6)
        )


def test_few_copies_and_large_convolutions_go_one_by_one() -> None:
    plain, convolution = (EnsembleLosses(*problem(kind)) for kind in ("classes", "convolution"))
    assert plain.vmap_pays(8, 10**6)
    assert not plain.vmap_pays(2, 100)
    assert convolution.vmap_pays(8, 8 * 784)
    assert not convolution.vmap_pays(8, 32 * 784)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("classes", {"by_vmap": True, "momentum": 0.9, "weight_decay": 0.01, "schedule": "cosine"}),
        ("classes", {"by_vmap": False, "momentum": 0.0}),
        ("squares", {"momentum": 0.5}),
        ("convolution", {"weight_decay": 0.01}),
        ("classes", {"optimizer": "adam", "weight_decay": 0.01}),
    ],
)
def test_training_at_once_is_training_one_by_one(kind: str, settings: dict[str, Any]) -> None:
    model, loss, data = problem(kind)
    before = parameters_to_vector(model.parameters()).detach().clone()
    shared = {
        "num_epochs": 3,
        "batch_size": 7,
        "lr": 0.1,
        "batches": shuffled_batches(NUM_EXAMPLES, batch_size=7, num_epochs=3, generator=torch.Generator()),
    }
    generator = torch.Generator().manual_seed(0)
    weights = weights_of_examples()
    found = train_ensemble(model, loss, data, example_weights=weights, **shared, **settings, generator=generator)
    assert torch.equal(parameters_to_vector(model.parameters()), before)
    own = {name: value for name, value in settings.items() if name != "by_vmap"}
    for k in range(NUM_COPIES):
        vector_to_parameters(before.clone(), model.parameters())
        history = train(model, loss, data, example_weights=weights[k], **shared, **own, generator=generator)
        expected = parameters_to_vector(model.parameters()).detach()
        torch.testing.assert_close(found.parameters[k], expected, rtol=1e-10, atol=1e-12)
        assert found.losses[k].tolist() == pytest.approx(history.losses, rel=1e-10)
        assert found.learning_rates == pytest.approx(history.learning_rates)


def test_results_print_few_lines_however_long_the_training() -> None:
    settings = {"num_epochs": 50, "batch_size": 10}
    copies = at_once(**settings)
    history = train(*problem("classes"), **settings, lr=0.1, generator=0, record=True)
    first, second = str(history).splitlines()
    assert first.startswith(
        f"training: loss from {history.losses[0]:.4g} to {history.losses[-1]:.4g} (20 examples"
    )
    assert second == "  100 steps, 50 epochs"
    assert repr(history.run).startswith("training run 100 steps (of SGDRule(momentum=0.9")
    assert str(copies).splitlines()[0].endswith("(2 copies in the last of 50 epochs)")


@pytest.mark.parametrize("end", [2, 3, 7, 8])  # in the first epoch, at its end, in the last one
@pytest.mark.parametrize("settings", [{"schedule": "cosine", "weight_decay": 0.01}, {"optimizer": "adam"}])
def test_an_interrupted_training_ends_at_the_same_weights(
    tmp_path: Path, settings: dict[str, Any], end: int
) -> None:
    def run(**changes: Any) -> Ensemble:
        return at_once(example_weights=weights_of_examples(), num_epochs=3, batch_size=7, **settings, **changes)

    whole, place = run(), {"checkpoint": Checkpoint(tmp_path / "ensemble.pt", every=2)}
    stopped(end, run, **place)
    steps: list[int] = []
    resumed = run(**place, callback=lambda state: steps.append(state.num_steps))
    assert steps[0] == (end - 1) // 2 * 2 + 1
    assert torch.equal(resumed.parameters, whole.parameters)
    assert torch.equal(resumed.losses, whole.losses)
    assert resumed.learning_rates == whole.learning_rates


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"example_weights": torch.ones(NUM_COPIES, NUM_EXAMPLES)}, "example_weights"),
        ({"momentum": 0.5}, "optimizer"),
        ({"start": torch.zeros(NUM_COPIES, 43)}, "start"),
        ({"generator": torch.Generator().manual_seed(1)}, "batches"),
        ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "loss"),
    ],
)
def test_a_checkpoint_of_another_ensemble_is_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    settings = {"example_weights": weights_of_examples(), "num_epochs": 1, "batch_size": 10}
    settings["checkpoint"] = Checkpoint(tmp_path / "ensemble.pt", every=1)
    model, loss, data = problem("classes")
    stopped(2, at_once, **settings)
    usual = {"lr": 0.1, "generator": 0} | settings
    with pytest.raises(ValueError, match=rf"belongs to other work \({named} differs?\)"):
        train_ensemble(model, changes.pop("loss", loss), data, **usual | changes)


def test_copies_may_start_apart() -> None:
    model, _, _ = problem("classes")
    start = torch.stack([parameters_to_vector(model.parameters()).detach() + 0.1 * k for k in range(2)])
    ends = at_once(start=start).parameters
    assert not torch.allclose(ends[0], ends[1])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"example_weights": torch.ones(20)}, r"one row for each copy and one column for each of the 20 examples"),
        ({"optimizer": "lbfgs"}, "unknown optimizer 'lbfgs': choose sgd or adam"),
        ({"start": torch.zeros(2, 5)}, r"start has shape \(2, 5\), not \(2, 43\)"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any], text: str) -> None:
    refuses(text, at_once, **changes)


@pytest.mark.parametrize("module", [nn.Dropout(0.1), nn.BatchNorm1d(4)])
def test_modules_that_differ_in_training_are_refused(module: nn.Module) -> None:
    model = nn.Sequential(module, nn.Linear(4, 3)).to(FP64)
    settings = {"num_epochs": 1, "batch_size": 8, "lr": 0.1, "generator": 0}
    with pytest.raises(ValueError, match=r"module '0' .* differs in training and in evaluation"):
        train_ensemble(model, *problem("classes")[1:], example_weights=torch.ones(2, 20), **settings)


def test_divergence_names_the_copies() -> None:
    weights = torch.ones(2, NUM_EXAMPLES)
    weights[1] = 1e8
    with pytest.raises(ArithmeticError, match=r"the loss of copies \[1\] is not finite .* to lr=0\.001"):
        at_once("squares", example_weights=weights, num_epochs=100, batch_size=20, lr=0.01)
