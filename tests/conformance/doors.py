"""Functions, kinds of model and kinds of data that users have: every function meets every kind of both.

`python -m tests.conformance.doors` writes the two tables of docs/library.md; `test_doors` holds every cell.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator
from curvlab.influence import influence, proximal_bregman_response, self_influence, unrolled_response
from curvlab.influence.retraining import ProximalSGD
from curvlab.linalg import identity
from curvlab.optim import NGD, Ginger
from curvlab.problem import only_parameters
from curvlab.sampling import choose_sgld_settings, estimate_llc
from curvlab.solvers import Lissa
from curvlab.spectrum import hutchinson_trace, top_eigenvalues
from curvlab.training import curvature_step, evaluate, train
from tests.conformance.ten_models import bert, gpt2, t5, vit
from tests.models import Examples

NUM_EXAMPLES, NUM_CLASSES = 6, 3


@dataclass(frozen=True)
class Case:
    """A model, its loss, and its data; `test` is two of the examples in the form of batches."""

    model: nn.Module
    loss: Any
    data: Any
    test: Any


# ------------------------------------------------------------------------------------------ functions
def by_run(case: Case) -> Tensor:
    run = train(case.model, case.loss, case.data, record=True, **PLAIN)
    found = influence(case.model, case.loss, case.data, case.test, run=run, filtered=True, rtol=0.1)
    return found.scores


PLAIN = {"num_steps": 2, "batch_size": 2, "lr": 1e-3, "momentum": 0.0, "progress": False, "generator": 0}


def unrolled(case: Case) -> Tensor:
    run = train(case.model, case.loss, case.data, record=True, **PLAIN)
    return unrolled_response(case.model, case.loss, case.data, case.test, run=run).scores


def spectrum(operator: Any) -> Any:
    top_eigenvalues(operator, 1, rtol=0.5, generator=0)
    return torch.tensor(hutchinson_trace(operator, num_matvecs=2, generator=0).value)


def fisher(case: Case) -> Any:
    kinds = [
        FisherOperator(case.model, case.loss, case.data, kind=kind, generator=0)
        for kind in ("empirical", "monte_carlo", "exact")
    ]
    return torch.cat([op @ op.randn(1, 0) for op in kinds])


CHAINS = {"num_chains": 2, "batch_size": 2, "num_burnin_steps": 4, "progress": False, "generator": 0}


def chosen_settings(case: Case) -> Tensor:
    few = {"_MAX_ROUNDS": 1, "_NOISE_BATCHES": 2, "_TRACE_PROBES": 2, "LANCZOS_STEPS": 2}  # eight do no more
    with patch.multiple("curvlab.sampling.pilots", **few):
        found = choose_sgld_settings(case.model, case.loss, case.data, num_steps=2, **CHAINS | {"num_chains": 1})
    return torch.tensor([found.step_size, found.localization])


def learning_coefficient(case: Case) -> Tensor:
    settings = CHAINS | {"num_burnin_steps": 2, "num_draws": 2, "step_size": 1e-4}
    return torch.tensor(estimate_llc(case.model, case.loss, case.data, **settings).value)


def trained_by(optimizer: Any, step: Any, case: Case) -> Any:
    train(case.model, case.loss, case.data, **PLAIN | {"optimizer": optimizer, "step": step})
    return torch.tensor(evaluate(case.model, case.loss, case.data).loss)


def bregman(case: Case) -> Any:
    optimizer = ProximalSGD(step_size=1e-4, num_steps=2, batch_size=2)
    return proximal_bregman_response(
        case.model, case.loss, case.data, [0, 3], damping=0.1, epsilon=1e-3, optimizer=optimizer, generator=0
    )


def lissa(case: Case) -> Any:
    names = [name for name, parameter in case.model.named_parameters() if parameter.requires_grad]
    last = names[-1:] if hasattr(case.model, "config") else names
    with only_parameters(case.model, *last):
        op = GaussNewtonOperator(case.model, case.loss, case.data)
        solver = Lissa.auto(op, 1.0, generator=0)
        return solver.solve(op + 1.0 * identity, op.randn(1, 0), generator=0).x


def scores(case: Case) -> Any:
    return influence(case.model, case.loss, case.data, case.test, damping=1.0, rtol=0.1).scores


def own_scores(case: Case) -> Any:
    return self_influence(case.model, case.loss, case.data, damping=1.0, rtol=0.1, progress=False).own


FUNCTIONS: dict[str, Callable[[Case], Tensor]] = {
    "influence": scores,
    "influence(run=..., filtered=True)": by_run,
    "self_influence": own_scores,
    "unrolled_response": unrolled,
    "proximal_bregman_response": bregman,
    "top_eigenvalues, hutchinson_trace of GaussNewtonOperator": lambda c: spectrum(
        GaussNewtonOperator(c.model, c.loss, c.data)
    ),
    "... of HessianOperator": lambda c: spectrum(HessianOperator(c.model, c.loss, c.data)),
    "FisherOperator": fisher,
    "Lissa.auto": lissa,
    "choose_sgld_settings": chosen_settings,
    "estimate_llc": learning_coefficient,
    "train and evaluate, NGD": partial(trained_by, NGD, None),
    "train and evaluate, Ginger": partial(
        trained_by, partial(Ginger, rank=2, decay=0.9, damping=1e-1), curvature_step
    ),
}


# ------------------------------------------------------------------------------------------ models
class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.head = kind(3, 3, batch_first=True), nn.Linear(3, NUM_CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layer(inputs)[0][:, -1])


class Encoder(nn.Module):
    """With a mask of padding: in eval mode PyTorch then has kernels of its own."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=4, dropout=0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(4, NUM_CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layers(inputs, src_key_padding_mask=inputs[..., 0] > 1.5)[:, 0])


class Branching(nn.Module):
    """What it does depends on the values, so that no `vmap` goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, NUM_CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        return self.last(hidden if hidden.isfinite().all() else hidden.nan_to_num())


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, NUM_CLASSES), nn.Linear(2, NUM_CLASSES)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.tanh(self.left(u)) * self.right(v)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(inputs)))


def mlp(outputs: int = NUM_CLASSES) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, outputs))


def convolution() -> nn.Module:
    norm = nn.BatchNorm2d(2)
    return nn.Sequential(nn.Conv2d(1, 2, 3), norm, nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8, 3))


class Idle(nn.Linear):
    """With a layer that its forward does not use."""

    def __init__(self) -> None:
        super().__init__(4, NUM_CLASSES)
        self.idle = nn.Linear(4, 3)


def half_frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=1, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    return peft.get_peft_model(without_dropout(gpt2()), config)


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):  # T5's attention
            module.dropout = 0.0
    return model


def log_cosh(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).cosh().log().mean()


def gaussian_nll(outputs: Tensor, targets: Tensor) -> Tensor:
    mean, log_variance = outputs.unbind(1)
    return (0.5 * log_variance + 0.5 * (targets[:, 0] - mean).square() / log_variance.exp()).mean()


def drawn(*shape: int) -> Tensor:
    return torch.randn(NUM_EXAMPLES, *shape)


def classes(*shape: int, number: int = NUM_CLASSES) -> Tensor:
    return torch.randint(number, (NUM_EXAMPLES, *shape))


def ids(length: int = 4) -> Tensor:
    return torch.randint(2, 11, (NUM_EXAMPLES, length))


def causal() -> dict[str, Tensor]:
    tokens = ids()
    return {"input_ids": tokens, "labels": tokens}


CROSS_ENTROPY = nn.CrossEntropyLoss()
# name -> model, loss, all examples: (inputs, targets), or a mapping that holds its labels.
MODELS: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    "MLP": lambda: (mlp(), CROSS_ENTROPY, (drawn(4), classes())),
    "half of it frozen": lambda: (half_frozen(), CROSS_ENTROPY, (drawn(4), classes())),
    "a layer that is not used": lambda: (Idle(), CROSS_ENTROPY, (drawn(4), classes())),
    "convolution, BatchNorm, Dropout": lambda: (convolution(), CROSS_ENTROPY, (drawn(1, 4, 4), classes())),
    "LSTM": lambda: (Recurrent(nn.LSTM), CROSS_ENTROPY, (drawn(3, 3), classes())),
    "GRU": lambda: (Recurrent(nn.GRU), CROSS_ENTROPY, (drawn(3, 3), classes())),
    "nn.TransformerEncoder": lambda: (Encoder(), CROSS_ENTROPY, (drawn(3, 4), classes())),
    "branches on values": lambda: (Branching(), CROSS_ENTROPY, (drawn(4), classes())),
    "tied weights": lambda: (Tied(), CROSS_ENTROPY, (ids(3) % 7, classes(3, number=7))),
    "two inputs": lambda: (TwoInputs(), CROSS_ENTROPY, ({"u": drawn(4), "v": drawn(2)}, classes())),
    "nn.Sequential, batches of dicts": lambda: (mlp(), CROSS_ENTROPY, {"image": drawn(4), "label": classes()}),
    "several labels": lambda: (mlp(), nn.BCEWithLogitsLoss(), (drawn(4), classes(3, number=2).float())),
    "regression": lambda: (mlp(1), nn.MSELoss(), (drawn(4), drawn(1))),
    "own loss, convex": lambda: (mlp(1), log_cosh, (drawn(4), drawn(1))),
    "own loss, not convex": lambda: (mlp(2), gaussian_nll, (drawn(4), 3 * drawn(1))),
    "BERT": lambda: (
        without_dropout(bert()),
        CROSS_ENTROPY,
        {"input_ids": ids(), "attention_mask": torch.ones(NUM_EXAMPLES, 4).long(), "labels": classes()},
    ),
    "GPT-2": lambda: (without_dropout(gpt2()), CROSS_ENTROPY, causal()),
    "GPT-2 with LoRA": lambda: (lora(), CROSS_ENTROPY, causal()),
    "T5": lambda: (without_dropout(t5()), CROSS_ENTROPY, {"input_ids": ids(), "labels": ids(3)}),
    "ViT": lambda: (
        without_dropout(vit()),
        CROSS_ENTROPY,
        {"pixel_values": drawn(3, 16, 16), "labels": classes()},
    ),
}


# ------------------------------------------------------------------------------------------ data
class Stream(IterableDataset):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def rows(data: Any, chosen: slice | int) -> Any:
    """Return some examples of (inputs, targets), or of a mapping, or one."""
    if isinstance(data, Mapping):
        return {name: value[chosen] for name, value in data.items()}
    if isinstance(data, tuple):
        return tuple(rows(part, chosen) for part in data)
    return data[chosen]


def single(data: Any) -> list[Any]:
    return [rows(data, index) for index in range(NUM_EXAMPLES)]


def in_batches(data: Any) -> list[Any]:
    return [rows(data, part) for part in (slice(0, 4), slice(4, NUM_EXAMPLES))]


# kind -> examples in that form, from (inputs, targets) or a mapping
KINDS: dict[str, Callable[[Any], Any]] = {
    "tensors": lambda data: data,
    "map-style data set": lambda data: Examples(single(data)),
    "Subset": lambda data: Subset(Examples(single(data)), range(NUM_EXAMPLES)),
    "list of examples": single,
    "list of batches": in_batches,
    "DataLoader": lambda data: DataLoader(Examples(single(data)), batch_size=4),
    "DataLoader with a collator": lambda data: DataLoader(
        Examples(single(data)), batch_size=4, collate_fn=default_collate
    ),
    "IterableDataset of batches": lambda data: Stream(in_batches(data)),
    "IterableDataset of examples": lambda data: Stream(single(data)),
    "TensorDataset": lambda data: TensorDataset(*data),
    "list of (x, int)": lambda data: [(x, int(y)) for x, y in single(data)],
    "data set of Hugging Face": lambda data: datasets.Dataset.from_dict(
        {name: value.tolist() for name, value in data.items()}
    ).with_format("torch"),
}
# Where these kinds exist: pairs of tensors, and mappings with their labels inside.
OF_PAIRS, OF_MAPPINGS = ("TensorDataset", "list of (x, int)"), ("data set of Hugging Face",)
FORMS = {
    "(inputs, targets)": ("MLP", [kind for kind in KINDS if kind not in OF_MAPPINGS]),
    "({name: input, ...}, targets)": ("two inputs", [k for k in KINDS if k not in OF_PAIRS + OF_MAPPINGS]),
    "mapping with labels inside": (
        "nn.Sequential, batches of dicts",
        [kind for kind in KINDS if kind not in OF_PAIRS],
    ),
}


@cache
def drawn_case(name: str) -> tuple[nn.Module, Any, Any]:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return MODELS[name]()


def case_of(name: str, layout: Callable[[Any], Any] = lambda data: data) -> Case:
    model, loss, data = drawn_case(name)
    return Case(copy.deepcopy(model).eval(), loss, layout(data), [rows(data, slice(0, 2))])


# ------------------------------------------------------------------------------------------ outcomes
# What is refused, (model, function) -> the words that say what to do; all else works.
WITHOUT_BATCH_NORM = "train the model without it"
NOT_CONVEX = "The loss is not convex in the outputs"
NO_DISTRIBUTION = "FunctionLoss(loss, sample_targets=...)"
REFUSED = {
    **{(f"own loss, {kind}", "FisherOperator"): NO_DISTRIBUTION for kind in ("convex", "not convex")},
    **{(f"own loss, {kind}", "train and evaluate, Ginger"): "draws labels" for kind in ("convex", "not convex")},
    ("convolution, BatchNorm, Dropout", "unrolled_response"): WITHOUT_BATCH_NORM,
    ("own loss, not convex", "influence(run=..., filtered=True)"): NOT_CONVEX,
    ("own loss, not convex", "Lissa.auto"): NOT_CONVEX,
}

LIBRARY = Path(__file__).parents[2] / "docs" / "library.md"
BEGIN, END = "<!-- doors: written by tests/conformance/doors.py -->", "<!-- doors end -->"


def table() -> str:
    """Return what works and what is refused, as it stands in docs/library.md."""
    columns = "".join(chr(ord("A") + place) for place in range(len(FUNCTIONS)))
    legend = "; ".join(f"{letter} `{name}`" for letter, name in zip(columns, FUNCTIONS, strict=True))
    lines = [f"{legend}.", "", f"| model | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for model in MODELS:
        cells = ["no" if (model, f) in REFUSED else "yes" for f in FUNCTIONS]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    lines += ["", "The same numbers for the same examples in each of these forms:", ""]
    lines += [f"- {form}: {', '.join(kinds)}" for form, (_, kinds) in FORMS.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    text = LIBRARY.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    LIBRARY.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")
