"""Training on batches that hold their labels, as data sets and collators of Hugging Face give them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, OPTConfig, OPTForCausalLM

from curvlab.iterate import Checkpoint
from curvlab.training import TrainingState, evaluate, train

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

    class Killed(Exception):
        pass

    def kill(state: TrainingState) -> None:
        if state.num_steps == 4:
            raise Killed

    whole, weights = run(data, num_epochs=3)
    assert len(whole.step_losses) == 6
    _, as_mapping = run(dict(rows), num_epochs=3)
    kept = {"checkpoint": Checkpoint(tmp_path / "run.pt", every=2), "num_epochs": 3}
    with pytest.raises(Killed):
        run(data, callback=kill, **kept)
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
