"""Steps of training, of language models, and of batches that hold their labels."""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, OPTConfig, OPTForCausalLM

from curvlab.iterate import Checkpoint
from curvlab.training import (
    Learner,
    MeanLoss,
    StepInfo,
    TrainingBatch,
    TrainingDivergedError,
    closure_step,
    curvature_step,
    evaluate,
    gradient_step,
    minimize,
    sampled_label_loss,
    shared_curvature_step,
    train,
    train_language_model,
)
from tests.refusals import refuses, stopped

FP64 = torch.float64


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(FP64)


def classes(size: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(size, 3, generator=generator, dtype=FP64)
    return inputs, (inputs[:, 0] + 0.5 * torch.randn(size, generator=generator, dtype=FP64) > 0).long()


def fit(model: nn.Module, **settings: Any):
    defaults = {"num_epochs": 3, "batch_size": 8, "generator": torch.Generator().manual_seed(0)}
    return train(model, nn.CrossEntropyLoss(), classes(), **(defaults | settings))


def test_gradients_are_clipped_to_the_norm() -> None:
    model = network()
    history = fit(
        model, lr=0.5, momentum=0.0, max_gradient_norm=1e-3, num_epochs=2, batch_size=24, measure_updates=True
    )
    assert history.update_norms == pytest.approx([0.5e-3] * 2, rel=1e-5)
    assert history.gradient_norm > 1e-2  # before clipping


def test_training_stops_at_the_gradient_norm() -> None:
    history = fit(network(), lr=1.0, momentum=0.0, batch_size=24, num_epochs=2000, gradient_norm=0.05)
    assert history.gradient_norm <= 0.05
    assert 1 < history.num_steps < 2000


@pytest.mark.parametrize("weight_decay", [0.01, 0.1])
def test_lbfgs_reaches_the_minimum_of_the_regularised_loss(weight_decay: float) -> None:
    model = network()
    settings = {"optimizer": "lbfgs", "lr": 1.0, "weight_decay": weight_decay, "batch_size": 24}
    history = fit(model, **settings, num_epochs=100, gradient_norm=1e-9)
    assert history.gradient_norm <= 1e-9
    assert history.num_steps < 100
    inputs, targets = classes()
    nn.CrossEntropyLoss()(model(inputs), targets).backward()
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad, -weight_decay * parameter.detach(), rtol=0, atol=1e-9)
    assert history.weight_decay == weight_decay
    again = fit(model, **settings, num_epochs=5, gradient_norm=1e-9)
    assert again.num_steps == 0
    assert again.learning_rates == ()
    assert again.losses == ()


def test_lbfgs_needs_full_batches() -> None:
    refuses("lbfgs needs full batches: batch_size is 8, there are 24", fit, network(), optimizer="lbfgs", lr=1.0)


def test_a_closure_step_of_sgd_is_a_gradient_step() -> None:
    ends = []
    for step in (gradient_step, closure_step):
        model = network()
        history = fit(model, lr=0.1, step=step)
        ends.append((parameters_to_vector(model.parameters()), history.step_losses))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


class Recorder(torch.optim.SGD):
    """SGD that keeps what `update_curvature` sees."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.seen: list[Tensor] = []

    def update_curvature(self) -> None:
        self.seen.append(torch.cat([p.grad.flatten() for group in self.param_groups for p in group["params"]]))


def test_curvature_sees_the_gradient_of_sampled_labels_in_eval_mode() -> None:
    """Its second moment is the Fisher matrix: see test_sampled_labels."""
    model = nn.Sequential(nn.Dropout(0.9), network()).train()
    optimizer = Recorder(model.parameters(), lr=0.0)
    inputs, targets = classes()
    torch.manual_seed(0)
    curvature_step(Learner(model, MeanLoss(nn.CrossEntropyLoss()), optimizer), TrainingBatch(inputs, targets))
    torch.manual_seed(0)
    value = sampled_label_loss(nn.CrossEntropyLoss(), model[1](inputs), targets, generator=torch.default_generator)
    expected = torch.autograd.grad(value, list(model.parameters()))
    torch.testing.assert_close(optimizer.seen[0], torch.cat([gradient.flatten() for gradient in expected]))
    assert model.training


def test_a_curvature_step_moves_by_the_gradient_of_the_loss_on_the_same_batches() -> None:
    plain, seen = network(), network()
    fit(plain, lr=0.1, momentum=0.0)
    fit(seen, optimizer=Recorder, lr=0.1, step=curvature_step)
    assert torch.equal(parameters_to_vector(plain.parameters()), parameters_to_vector(seen.parameters()))


def test_a_shared_forward_pass_gives_the_same_step_and_sees_the_same_gradient() -> None:
    ends, seen, losses = [], [], []
    for step in (curvature_step, shared_curvature_step):
        model = network()
        optimizer = Recorder(model.parameters(), lr=0.1)
        losses.append(fit(model, optimizer=optimizer, step=step).step_losses)
        ends.append(parameters_to_vector(model.parameters()))
        seen.append(torch.stack(optimizer.seen))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-12, atol=0)
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("step", [curvature_step, shared_curvature_step])
def test_curvature_sees_nothing_of_outputs_that_are_not_finite(step: Any) -> None:
    model = network()
    with torch.no_grad():
        next(model.parameters())[0] = math.inf
    optimizer = Recorder(model.parameters(), lr=0.1)
    before = parameters_to_vector(model.parameters())
    info = step(Learner(model, MeanLoss(nn.CrossEntropyLoss()), optimizer), TrainingBatch(*classes()))
    assert math.isnan(info.loss)
    assert optimizer.seen == []
    assert torch.equal(before, parameters_to_vector(model.parameters()))


def test_a_curvature_step_says_what_it_needs() -> None:
    with pytest.raises(TypeError, match=r"needs an optimizer with update_curvature\(\)"):
        fit(network(), lr=0.1, step=curvature_step)
    learner = Learner(network(), MeanLoss(nn.functional.cross_entropy), Recorder(network().parameters(), 0.1))
    with pytest.raises(TypeError, match=r"draws labels .*: pass nn.CrossEntropyLoss"):
        curvature_step(learner, TrainingBatch(*classes()))


def test_a_step_of_ones_own_is_a_function() -> None:
    def signs(learner: Learner, batch: TrainingBatch) -> StepInfo:
        loss = learner.batch_loss(batch)
        gradients = torch.autograd.grad(loss, learner.parameters)
        with torch.no_grad():
            for parameter, gradient in zip(learner.parameters, gradients, strict=True):
                parameter.sub_(0.01 * gradient.sign())
        return StepInfo(loss.item())

    history = fit(network(), lr=0.01, step=signs, num_epochs=20)
    assert history.losses[-1] < history.losses[0]


def test_minimize_stops_at_the_gradient_norm() -> None:
    point = nn.Parameter(torch.tensor([2.0, -1.0], dtype=FP64))
    optimizer = torch.optim.LBFGS([point], max_iter=3, line_search_fn="strong_wolfe", tolerance_change=0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = (point**2 * torch.tensor([1.0, 10.0], dtype=FP64)).sum() + 3.0
        value.backward()
        return value

    search = partial(minimize, closure, [point], optimizer, gradient_norm=1e-8)
    short = search(max_steps=1)
    assert not short.converged
    assert short.num_steps == 1
    found = search(max_steps=50)
    assert found.converged
    assert found.gradient_norm <= 1e-8
    assert found.value == pytest.approx(3.0)
    assert search(max_steps=50).num_steps == 0


# --- Training on tokens: it learns what can be known, reproducibly, and says when it cannot go on
class Bigram(nn.Module):
    """Tokens (N, T) -> logits (N, T, V), each from the token before it alone."""

    def __init__(self, size: int = 5) -> None:
        super().__init__()
        self.table = nn.Embedding(size, size)
        nn.init.zeros_(self.table.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


def chain(num_sequences: int = 64, length: int = 12) -> tuple[Tensor, Tensor]:
    """Sequences in which token k is followed by k + 1 (mod 5) with probability 3/4, else by k."""
    generator = torch.Generator().manual_seed(0)
    steps = (torch.rand(num_sequences, length, generator=generator) < 0.75).long()
    tokens = steps.cumsum(1) % 5
    inputs = torch.cat([torch.zeros(num_sequences, 1, dtype=torch.long), tokens[:, :-1]], dim=1)
    return inputs, tokens


def train_bigram(model: nn.Module, **settings):
    defaults = {"num_steps": 300, "batch_size": 16, "lr": 0.1, "warmup_steps": 10}
    generator = torch.Generator().manual_seed(0)
    return train_language_model(model, chain(), **(defaults | settings), generator=generator)


def test_a_bigram_model_learns_the_chain() -> None:
    model = Bigram()
    history = train_bigram(model)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    measured = evaluate(model, nn.CrossEntropyLoss(), chain())
    assert measured.loss == pytest.approx(entropy, abs=0.03)
    assert measured.accuracy == pytest.approx(0.75, abs=0.03)
    assert (measured.num_examples, measured.num_predictions) == (64, 64 * 12)
    assert history.losses[0] > history.losses[-1]
    assert len(history.losses) == 75  # passes of four batches
    assert len(history.step_losses) == 300
    assert not model.training
    assert model.table.weight.grad is None


def test_ignored_targets_count_neither_in_training_nor_in_evaluation() -> None:
    inputs, targets = chain()
    hidden = targets.clone()
    hidden[:, ::2] = -100
    model = Bigram()
    train_language_model(
        model, (inputs, hidden), num_steps=50, batch_size=16, lr=0.1, generator=torch.Generator().manual_seed(0)
    )
    kept = hidden != -100
    expected = functional.cross_entropy(model(inputs)[kept], targets[kept]).item()
    measured = evaluate(model, nn.CrossEntropyLoss(), (inputs, hidden), batch_size=7)
    assert measured.loss == pytest.approx(expected, rel=1e-5)
    right = (model(inputs).argmax(-1) == targets)[kept]
    assert measured.accuracy == pytest.approx(float(right.double().mean()))
    assert measured.num_predictions == int(kept.sum())
    with pytest.raises(ValueError, match="every target is ignored"):
        evaluate(model, nn.CrossEntropyLoss(), (inputs, torch.full_like(targets, -100)))


def test_learning_rate_warms_up_and_falls_to_nothing() -> None:
    assert train_bigram(Bigram(), num_steps=100).learning_rates[-1] == pytest.approx(
        0.1 * 0.5 * (1 + math.cos(math.pi * 89 / 90)), rel=1e-6
    )
    assert train_bigram(Bigram(), num_steps=6, warmup_steps=5, lr=0.2).learning_rates[-1] == pytest.approx(0.2)


def test_errors_say_what_to_change() -> None:
    refuses("warmup_steps < num_steps", train_bigram, Bigram(), warmup_steps=300)
    frozen = Bigram()
    frozen.requires_grad_(False)
    refuses("no parameter that requires gradients", train_bigram, frozen)
    broken = Bigram()
    with torch.no_grad():
        broken.table.weight[0, 0] = math.inf
    with pytest.raises(TrainingDivergedError, match=r"nan before the first step: look for NaN or huge values"):
        train_bigram(broken)


# --- Training on batches that hold their labels, as data sets and collators of Hugging Face give them
WIDTHS = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
LENGTHS = (3, 6, 4, 5, 6, 2)


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(**WIDTHS, intermediate_size=16, num_labels=3, attn_implementation="eager")
    return BertForSequenceClassification(config)  # with dropout: it is trained in train mode


def opt() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"ffn_dim": 16, "max_position_embeddings": 12, "word_embed_proj_dim": 8, "dropout": 0.0}
    return OPTForCausalLM(OPTConfig(**WIDTHS, **sizes, attn_implementation="eager"))


def sentences() -> Dataset:
    """Return six sentences of different lengths with a class each, and a column that no model takes."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(2, 20, (length,), generator=generator).tolist() for length in LENGTHS]
    columns = {"input_ids": ids, "label": [0, 1, 2, 2, 1, 0], "row": list(range(6))}
    return Dataset.from_dict(columns)


def padded(rows: list[dict], *, causal: bool = False) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)

    def pad(row: list[int], value: int) -> list[int]:
        return row + [value] * (longest - len(row))

    ids = torch.tensor([pad(row["input_ids"], 0) for row in rows])
    mask = torch.tensor([pad([1] * len(row["input_ids"]), 0) for row in rows])
    labels = ids.masked_fill(mask == 0, -100) if causal else torch.tensor([row["label"] for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def causal(rows: list[dict]) -> dict[str, Tensor]:
    return padded(rows, causal=True)


def sgd_by_hand(model: nn.Module, collate, batches: list[Tensor], lr: float) -> list[float]:
    """Train by `model(**batch).loss`, as a user's own loop does, and return its losses."""
    data, losses = sentences(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for indices in batches:
        loss = model(**collate([data[int(i)] for i in indices])).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(("build", "collate"), [(bert, padded), (opt, causal)], ids=["bert", "opt"])
def test_equals_a_loop_over_the_models_own_loss(build, collate) -> None:
    batches = [torch.tensor([4, 1]), torch.tensor([0, 2, 5]), torch.tensor([3])]
    by_hand, model = build(), build()
    for module in (*by_hand.modules(), *model.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    expected = sgd_by_hand(by_hand.train(), collate, batches, lr=0.1)
    loader = DataLoader(sentences(), batch_size=2, collate_fn=collate)
    history = train(
        model.train(),
        nn.CrossEntropyLoss(),
        loader,
        num_steps=3,
        batch_size=1,
        batches=batches,
        lr=0.1,
        momentum=0.0,
        validation=loader,
        generator=torch.Generator().manual_seed(0),
    )
    assert list(history.step_losses) == pytest.approx(expected, rel=1e-5)
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    with torch.no_grad():  # all in one padded batch: the mean over all predictions
        whole = float(by_hand.eval()(**collate(list(sentences()))).loss)
    assert history.validation[-1] == pytest.approx(whole, rel=1e-4)


def test_a_data_set_without_collator_trains_in_random_order_and_resumes(tmp_path: Path) -> None:
    rows = padded(list(sentences()))
    data = Dataset.from_dict({name: value.tolist() for name, value in rows.items()}).with_format("torch")
    settings = {"batch_size": 4, "lr": 0.1, "optimizer": "adam"}

    def run(given, **more):
        model = bert()
        generator = torch.Generator().manual_seed(3)
        found = train(model, nn.CrossEntropyLoss(), given, **settings, generator=generator, **more)
        return found, copy.deepcopy(model.state_dict())

    whole, weights = run(data, num_epochs=3)
    assert len(whole.step_losses) == 6
    _, as_mapping = run(dict(rows), num_epochs=3)
    kept = {"checkpoint": Checkpoint(tmp_path / "run.pt", every=2), "num_epochs": 3}
    stopped(4, run, data, **kept)
    _, resumed = run(data, **kept)
    for name, value in weights.items():
        assert torch.equal(value, resumed[name])
        assert torch.equal(value, as_mapping[name])


def test_evaluate_counts_classes() -> None:
    model, rows = bert().eval(), padded(list(sentences()))
    found = evaluate(model, nn.CrossEntropyLoss(), rows, batch_size=4)
    with torch.no_grad():
        outputs = model(**rows)
    assert found.loss == pytest.approx(float(outputs.loss), rel=1e-5)
    assert found.accuracy == float((outputs.logits.argmax(-1) == rows["labels"]).double().mean())


def test_sentences_without_a_collator_are_refused_with_advice() -> None:
    with pytest.raises((TypeError, ValueError), match="collate"):
        train(
            bert(),
            nn.CrossEntropyLoss(),
            sentences().with_format("torch"),
            num_epochs=1,
            batch_size=3,
            lr=0.1,
            generator=torch.Generator().manual_seed(0),
        )


@pytest.mark.filterwarnings("ignore:Using a target size")  # PyTorch's own, of two of the four
def test_outputs_and_targets_that_pytorch_would_broadcast_are_refused() -> None:
    torch.manual_seed(0)
    # Below its target every output has the same |h - y| in the mean, broadcast or not: the first is of that kind.
    model, x, y = nn.Linear(3, 1), torch.randn(8, 3), torch.arange(8.0) + 9
    for loss in (nn.HuberLoss(), nn.L1Loss(), functional.smooth_l1_loss, nn.MSELoss()):
        refuses(r"targets.unsqueeze\(-1\)", evaluate, model, loss, (x, y))
        with pytest.raises(ValueError, match=r"targets.unsqueeze\(-1\)"):
            train(model, loss, (x, y), num_steps=1, batch_size=4, lr=0.1, generator=0)
        assert evaluate(model, loss, (x, y[:, None])).accuracy is None


def test_a_mean_over_examples_may_be_called_batchmean() -> None:
    torch.manual_seed(0)
    model, x, p = (
        nn.Sequential(nn.Linear(3, 4), nn.LogSoftmax(-1)),
        torch.randn(8, 3),
        torch.randn(8, 4).softmax(-1),
    )
    loss = nn.KLDivLoss(reduction="batchmean")
    assert evaluate(model, loss, (x, p), batch_size=3).loss == pytest.approx(float(loss(model(x), p)))
    own = MeanLoss(loss)(model(x), p, torch.arange(8.0))
    assert float(own) == pytest.approx(float((torch.arange(8.0)[:, None] * p * (p.log() - model(x))).sum() / 8))
