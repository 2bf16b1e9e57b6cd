"""A task as conf/task describes it: data, a network, its training, and what of it the curvature refers to.

for task in Task.each(run, cfg):
    inputs, targets = task.pair("train")                     # on the device
    model = task.build(task.generator("start", seed))        # a start that all optimizers of a seed share
    network = task.trained()                                 # trained once and stored, then frozen
    operator = GaussNewtonOperator(network.model, network.loss, network.train)
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Self

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from curvlab.lab import Run, task_label, task_settings, unit
from curvlab.lab.data import (
    DataSplits,
    TextCorpus,
    TokenSplits,
    pretrained_tokenizer,
    token_splits,
    train_tokenizer,
)
from curvlab.lab.data.image_folder import ImageFiles
from curvlab.lab.models import build_model
from curvlab.lab.runs.over_ranks import launched, shard
from curvlab.problem import freeze, stack
from curvlab.problem.memory import share_of_free
from curvlab.problem.own_losses import output_loss
from curvlab.training import evaluate, train, train_language_model

LOSSES = {"classification": nn.CrossEntropyLoss, "binary": nn.BCEWithLogitsLoss, "regression": nn.MSELoss}
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Task:
    """Data, and a network by its config; nothing is built or trained yet.

    Attributes:
        run: store, seeds, device and progress.
        name: in the config.
        settings: of this task, see `task_settings`: nodes `data` and `model`; `seed_name`, what its random streams
            are named after (the name unless given); for text `tokenizer` (`vocabulary_size`, or `pretrained`: a
            name on the hub) and `sequence_length`; for images `label_noise`, a share of the training labels (0
            unless given); and what `trained` or a target's own training reads.
        splits: training and test set with what is needed to show them.
        data_key: identifies the data, and how text is cut, in the store.
    """

    run: Run
    name: str
    settings: DictConfig
    splits: DataSplits | TokenSplits
    data_key: dict[str, Any]

    @classmethod
    def each(cls, run: Run, cfg: DictConfig) -> Iterator[Self]:
        """Yield the tasks of a target's config one after another, so that one data set is held at a time."""
        for name, settings in task_settings(cfg).items():
            yield cls.load(run, name, settings)

    @classmethod
    def load(cls, run: Run, name: str, settings: DictConfig) -> Self:
        """Load the data of one task; of text train the tokenizer, or take the stored one, and cut it."""
        loaded = instantiate(settings.data)
        run.record_data(loaded.name, loaded.checksum)
        if not isinstance(loaded, TextCorpus):
            key: dict[str, Any] = {"data": {"checksum": loaded.checksum}}
            if noise := settings.get("label_noise", 0.0):
                generator = run.generator("label noise", settings.get("seed_name", name))
                loaded = with_label_noise(loaded, float(noise), generator)
                key |= {"label_noise": float(noise)}
            return cls(run, name, settings, loaded, key)
        key = {"data": loaded.checksum, "tokenizer": files_by_name(settings.tokenizer)}
        tokenizer = _tokenizer(run, loaded, settings.tokenizer, **key)["json"]
        splits = token_splits(loaded, tokenizer, sequence_length=settings.sequence_length)
        return cls(run, name, settings, splits, key | {"sequence_length": settings.sequence_length})

    @property
    def label(self) -> str:
        """What tables and figures call it."""
        return task_label(self.name)

    @property
    def seed_name(self) -> str:
        """What its random streams are named after, here and in all that measures it."""
        return str(self.settings.get("seed_name", self.name))

    @property
    def key(self) -> dict[str, Any]:
        """Identifies data, network and random streams in the store, free of paths."""
        model = files_by_name(self.settings.model)
        return {"seed_name": self.seed_name, **self.data_key, "model": model}

    @property
    def loss(self) -> nn.Module:
        """Mean over examples, or over predicted tokens."""
        return LOSSES[self.splits.task]()

    @property
    def is_language(self) -> bool:
        """Whether the examples are sequences of tokens."""
        return isinstance(self.splits, TokenSplits)

    @property
    def num_train(self) -> int:
        """N, training examples."""
        return len(self.splits.train)  # type: ignore[arg-type]  # map-style

    def changed(self, **settings: Any) -> Self:
        """Return the task on the same data with other settings: a width, a seed_name."""
        merged: Any = OmegaConf.merge(self.settings, settings)
        return replace(self, settings=merged)

    def generator(self, stream: str, *names: str | int) -> torch.Generator:
        """Return a random stream of this task, by its own name and further ones: a seed, an order."""
        return self.run.generator(stream, self.seed_name, *names)

    def build(
        self,
        generator: torch.Generator,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        **more: Any,
    ) -> nn.Module:
        """Return the network at a random start, in eval mode; `more` goes to its factory.

        It is on the run's device unless another one is given, and in `dtype` if one is given.
        """
        model = build_model(
            partial(instantiate, self.settings.model, **more),
            input_shape=self.splits.input_shape,
            num_outputs=self.splits.num_outputs,
            generator=generator,
        )
        return model.to(device or self.run.device, dtype)

    def pair(
        self, part: str = "train", indices: Tensor | None = None, *, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) of the "train" or "test" set, or of the places `indices` in it, on the device.

        Numbers that are not integers take `dtype`, if it is given.
        """
        data = getattr(self.splits, part)
        found = stack(data, torch.arange(len(data)) if indices is None else indices)
        inputs, targets = (t.to(self.run.device, dtype if t.is_floating_point() else None) for t in found)
        return inputs, targets

    def trained(self) -> TrainedTask:
        """Train the network or take the stored one, freeze what the config says, and measure it.

        Reads of the settings `training` (null: the model comes with its weights); `freeze`; `curvature_train`, how
        many training examples, drawn at random, the curvature is the mean over (null: all); for language models
        `model_seed`, of the initial weights and the order of training, and `sharded`: whether torchrun's processes
        cut up the parameters, for models that one device cannot hold.
        """
        return _trained_language(self) if self.is_language else _trained_network(self)


@dataclass(frozen=True)
class TrainedTask(Task):
    """A task whose network is trained and in eval mode.

    Attributes:
        model: parameters that require gradients are the ones curvature refers to.
        train: examples whose mean curvature is meant: a data set, a loader or a pair of tensors.
        train_indices: (num_train,) their places in the training set.
        trained_key: identifies the network, `train` and `seed_name` in the store, free of paths.
        num_parameters: P, those that require gradients.
        train_loss: mean over `train`.
        test_loss: on the test text; nan for other data.
        test_accuracy: on all test examples; None for regression.
    """

    model: nn.Module
    train: Any
    train_indices: Tensor
    trained_key: dict[str, Any]
    num_parameters: int
    train_loss: float
    test_loss: float
    test_accuracy: float | None

    @property
    def key(self) -> dict[str, Any]:
        """Identifies the network, `train` and `seed_name` in the store."""
        return self.trained_key

    @property
    def num_train(self) -> int:
        """How many examples the curvature is the mean over."""
        return len(self.train_indices)

    @property
    def predictions_per_example(self) -> float:
        """Mean number of predicted tokens of a sequence, 1 for other data: what the LiSSA paper's |B| counts."""
        return output_loss(self.loss).count(self.train[1]) / self.num_train if self.is_language else 1.0

    @property
    def tensor_sizes(self) -> list[int]:
        """P_1, ..., P_L: the sizes of the parameter tensors that curvature refers to."""
        return [parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def perplexities(self) -> dict[str, float]:
        """Exp of the mean loss a token, on the curvature's sequences (`train`) and on the test text (`test`)."""
        losses = {"train": self.train_loss, "test": self.test_loss}
        return {part: float(torch.tensor(loss).exp()) for part, loss in losses.items()}


def files_by_name(node: Any) -> Any:
    """Return a config node as plain values, files by their names: where they lie changes no number."""
    if OmegaConf.is_config(node):
        return files_by_name(OmegaConf.to_container(node, resolve=True))
    if isinstance(node, dict):
        return {key: files_by_name(value) for key, value in node.items()}
    if isinstance(node, list):
        return [files_by_name(value) for value in node]
    return PurePath(node).name if isinstance(node, str) and "/" in node else node


@unit("tokenizer", version=1, about="a tokenizer")
def _tokenizer(_: Run, corpus: TextCorpus, settings: DictConfig, /, **_key: Any) -> dict[str, Any]:
    pretrained = settings.get("pretrained")
    if pretrained is not None:
        return {"json": pretrained_tokenizer(pretrained)}
    return {"json": train_tokenizer(corpus.train, vocabulary_size=settings.vocabulary_size)}


def _trained_network(task: Task) -> TrainedTask:
    run, settings, loading = task.run, task.settings, task.settings.get("loading") or {}
    model = task.build(task.generator("model"))
    key = task.key | {"training": files_by_name(settings.training)}
    generator, progress = task.generator("training"), run.bar(f"train {task.seed_name}")
    fit = partial(train, model, task.loss, task.splits.train, generator=generator, progress=progress)
    _train(task, model, _trained_model, fit, key)
    indices = _curvature_indices(task)
    examples = chosen_examples(task.splits, indices, loading)
    num_parameters = freeze(model.eval(), **settings.freeze)
    key |= {"freeze": files_by_name(settings.freeze), "curvature_train": len(indices)}
    measured = _evaluation(run, task, model, examples, **key)
    return _measured(task, measured, (model, examples, indices), key, num_parameters)


@unit("evaluation", version=1, about="losses of {seed_name}")
def _evaluation(_: Run, task: Task, model: nn.Module, examples: Any, /, **_key: Any) -> dict[str, Any]:
    held_out = held_out_examples(task.splits, task.settings.get("loading") or {})
    return {
        "train_loss": evaluate(model, task.loss, examples).loss,
        "test_accuracy": evaluate(model, task.loss, held_out).accuracy,
    }


def _trained_language(task: Task) -> TrainedTask:
    run, settings = task.run, task.settings
    sharded = settings.get("sharded", False)
    # What is cut up over processes need not fit on one device.
    device = torch.device("cpu") if sharded else run.device
    model = task.build(run.generator("language model", settings.model_seed), device=device)
    # One network serves tasks with streams of other names: the name is no part of its own key.
    key = {name: value for name, value in task.key.items() if name != "seed_name"}
    key |= {"training": files_by_name(settings.training), "model_seed": settings.model_seed}
    generator = run.generator("language model training", settings.model_seed)
    progress = run.bar(f"train {task.label}")
    fit = partial(train_language_model, model, task.splits.train, generator=generator, progress=progress)
    _train(task, model, _trained_language_model, fit, key)
    num_parameters = freeze(model.eval(), **settings.freeze)
    model = shard(model, run.device) if sharded else model
    indices = _curvature_indices(task)
    examples = stack(task.splits.train, indices)

    freezing = {"freeze": files_by_name(settings.freeze), "curvature_train": len(indices)}
    key |= freezing | {"seed_name": task.seed_name}
    measured = _language_evaluation(run, task, model, examples, **key)
    return _measured(task, measured, (model, examples, indices), key, num_parameters)


@unit("language_evaluation", version=1, about="losses of {seed_name}, model seed {model_seed}")
def _language_evaluation(_: Run, task: Task, model: nn.Module, examples: Any, /, **_key: Any) -> dict[str, Any]:
    test = evaluate(model, task.loss, task.splits.test, batch_size=32)
    train_loss = evaluate(model, task.loss, examples, batch_size=32).loss
    return {"train_loss": train_loss, "test_loss": test.loss, "test_accuracy": test.accuracy}


def _measured(
    task: Task, measured: dict[str, Any], network: tuple[nn.Module, Any, Tensor], key: dict[str, Any], size: int
) -> TrainedTask:
    model, examples, indices = network
    return TrainedTask(
        **vars(task),
        model=model,
        train=examples,
        train_indices=indices,
        trained_key=key,
        num_parameters=size,
        train_loss=measured["train_loss"],
        test_loss=measured.get("test_loss", float("nan")),
        test_accuracy=measured["test_accuracy"],
    )


def _curvature_indices(task: Task) -> Tensor:
    """Return the places of the training examples that the curvature is the mean over, ascending."""
    indices, num = torch.arange(task.num_train), task.settings.curvature_train
    if num is None or num >= len(indices):
        return indices
    order = torch.randperm(len(indices), generator=task.run.generator("curvature_train", task.splits.name))
    return order[:num].sort().values


def _train(
    task: Task, model: nn.Module, fitted: Callable[..., Any], fit: Callable[..., Any], key: dict[str, Any]
) -> None:
    """Train a model by `fit` as the config says, or give it the stored weights; null: it has its own."""
    if task.settings.training is None:
        return
    weights = fitted(task.run, task, model, fit, **key)["weights"]
    model.load_state_dict({name: value.to(task.run.device) for name, value in weights.items()})


def _fitted(
    _: Run, task: Task, model: nn.Module, fit: Callable[..., Any], /, *, checkpoint: Path, **_key: Any
) -> dict[str, Any]:
    settings = {str(setting): value for setting, value in task.settings.training.items()}
    history = fit(**settings, checkpoint=checkpoint / "training.pt")
    return {"weights": model.state_dict(), "losses": list(history.losses)}


_trained_model = unit("trained_model", version=1, about="training {seed_name}", resumes=True)(_fitted)
_trained_language_model = unit(
    "trained_language_model", version=1, about="a language model, model seed {model_seed}", resumes=True
)(_fitted)


# ------------------------------------------------------------------------------------ reading
# Examples of a task that lie in files: stacked where they are few, else read by worker processes at each pass.
SHARE = 0.1  # of the memory that may be used: what is stacked stays there beside vectors and activations
EXAMPLES_OF_A_WORKER = 64  # at a time; two such batches of each worker wait


def chosen_examples(splits: DataSplits, indices: Tensor, settings: Mapping[Any, Any]) -> Any:
    """Return the training examples `indices`: a data set, a pair of tensors, or a DataLoader in their order.

    Sets in memory are indexed. Of images in files, at most `memory_budget` bytes are stacked; what has more,
    and all of them where all are asked for, comes through a DataLoader.

    Args:
        splits: the data.
        indices: ascending.
        settings: `memory_budget` (null: a tenth of 80 % of what is free), `num_workers` (null: one for each core,
            8 at most), `batch_size` of the loader; what it lacks is null.
    """
    everything = len(indices) == len(splits.train)  # type: ignore[arg-type]  # map-style
    budget, size = settings.get("memory_budget"), math.prod(splits.input_shape) * torch.float32.itemsize
    budget = SHARE * share_of_free(torch.device("cpu")) if budget is None else budget
    few = not isinstance(splits.train, ImageFiles) or len(indices) * size <= budget
    if not everything and few:
        return stack(splits.train, indices)
    dataset = splits.train if everything else Subset(splits.train, indices.tolist())
    # Under torchrun each rank reads its own share: a loader cannot be cut into shares.
    return _loader(dataset, settings) if isinstance(splits.train, ImageFiles) and not launched() else dataset


def held_out_examples(splits: DataSplits, settings: Mapping[Any, Any]) -> Any:
    """Return the test set, through a DataLoader where it is read from files."""
    return _loader(splits.test, settings) if isinstance(splits.test, ImageFiles) else splits.test


def with_label_noise(splits: DataSplits, share: float, generator: torch.Generator) -> DataSplits:
    """Return the splits with a share of the training labels drawn anew, uniformly over the other classes.

    A network that has converged on them keeps a training loss of about the labels' entropy.
    """
    if not 0 <= share < 1:
        raise ValueError(f"label_noise is a share of the labels, from 0 to below 1, got {share}")
    inputs, targets = stack(splits.train, torch.arange(len(splits.train)))  # type: ignore[arg-type]  # map-style
    chosen = torch.randperm(len(targets), generator=generator)[: round(share * len(targets))]
    shifts = torch.randint(1, splits.num_outputs, (len(chosen),), generator=generator)
    noisy = targets.clone()
    noisy[chosen] = (noisy[chosen] + shifts) % splits.num_outputs
    return replace(splits, train=TensorDataset(inputs, noisy))


def _loader(dataset: Any, settings: Mapping[Any, Any]) -> DataLoader[Any]:
    workers = settings.get("num_workers")
    workers = min(8, os.cpu_count() or 1) if workers is None else workers
    return DataLoader(dataset, settings.get("batch_size") or EXAMPLES_OF_A_WORKER, num_workers=workers)
