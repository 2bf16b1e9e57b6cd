"""The network that was trained on wrong labels, its margins on the way, and its cross-validation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from omegaconf import DictConfig
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn

from curvlab.influence import CorruptedLabels, corrupt_labels, margins, subset_weights
from curvlab.lab import Run, unit
from curvlab.linalg import unflatten
from curvlab.problem import ModelFunction
from curvlab.training import evaluate, train, train_ensemble
from experiments.shared.task import Task, files_by_name


@dataclass(frozen=True)
class CorruptedTask(Task):
    """One task and seed: data with wrong labels, and trainings on them.

    Attributes:
        seed: of the wrong labels, the initial weights and the order of batches.
        inputs: (N, ...), of the training set.
        corrupted: (N,) labels, and which of them are wrong.
        initial: the network before training.
    """

    seed: int
    inputs: Tensor
    corrupted: CorruptedLabels
    initial: nn.Module

    @property
    def key(self) -> dict[str, Any]:
        """All that the trained network depends on."""
        settings = {"fraction": self.settings.fraction, "training": files_by_name(self.settings.training)}
        return super().key | settings | {"network_seed": self.seed}

    @property
    def described(self) -> str:
        """For the terminal."""
        return f"{self.label}, seed {self.seed}"

    @property
    def train_data(self) -> tuple[Tensor, Tensor]:
        """Inputs, and labels as given."""
        return self.inputs, self.corrupted.labels

    @cached_property
    def model(self) -> nn.Module:
        """The network after training."""
        self.initial.load_state_dict({k: v.to(self.run.device) for k, v in self.after_training["weights"].items()})
        return self.initial.eval()

    @cached_property
    def after_training(self) -> dict[str, Any]:
        """Return weights, the mean margin over the epochs (N,), and how well the network does."""
        return _trained(self)

    @property
    def cross_validated(self) -> Tensor:
        """Probabilities by networks that did not see the example, (N, C)."""
        found = _cross_validated(self, num_folds=self.settings.num_folds)
        return found["probabilities"].to(self.inputs)

    def outputs(self, model: nn.Module) -> Tensor:
        """Logits on the training set, (N, C)."""
        with torch.no_grad():
            return torch.cat([model(some) for some in self.inputs.split(1024)])

    def generator(self, stream: str, *names: str | int) -> torch.Generator:
        """Return the stream of this task and seed."""
        return super().generator(stream, *names, self.seed)


def load_task(run: Run, name: str, settings: DictConfig, seed: int) -> CorruptedTask:
    """Load the data, corrupt a fraction of the training labels, and build the network."""
    task = Task.load(run, name, settings)
    if task.splits.task != "classification":
        raise ValueError(f"data={task.splits.name} has no class labels to corrupt: it is for {task.splits.task}")
    (inputs, labels), generator = task.pair(), task.generator("wrong labels", seed)
    classes, fraction = task.splits.num_outputs, settings.fraction
    found = corrupt_labels(labels.cpu(), num_classes=classes, fraction=fraction, generator=generator)
    corrupted = CorruptedLabels(found.labels.to(run.device), found.mislabelled.to(run.device))
    initial = task.build(task.generator("model", seed))
    return CorruptedTask(**vars(task), seed=seed, inputs=inputs, corrupted=corrupted, initial=initial)


def _hyper(settings: DictConfig) -> dict[str, Any]:
    names = ("num_epochs", "batch_size", "lr", "optimizer", "momentum", "weight_decay")
    return {name: settings.training[name] for name in names if name in settings.training}


@unit("fig6/trained", version=1, about="training {seed_name}, seed {network_seed}")
def _trained(task: CorruptedTask, /, **_: Any) -> dict[str, Any]:
    model, labels = task.initial, task.corrupted.labels

    def seen(epoch: int, loss: float) -> dict[str, Tensor]:
        return {"margins": margins(task.outputs(model), labels)}

    generator, hyper = task.generator("training"), _hyper(task.settings)
    history = train(model, task.loss, task.train_data, **hyper, generator=generator, on_epoch_end=seen)
    outputs, wrong = task.outputs(model), task.corrupted.mislabelled
    losses = nn.functional.cross_entropy(outputs, labels, reduction="none")
    return {
        "weights": model.state_dict(),
        "area_under_margin": torch.stack([r["margins"] for r in history.records if r is not None]).mean(0),
        "train_loss": float(losses.mean()),
        "wrong_label_loss": float(losses[wrong].mean()),
        "wrong_labels_predicted": float((outputs.argmax(1) == labels)[wrong].double().mean()),
        "test_accuracy": evaluate(model, task.loss, task.splits.test).accuracy,
    }


@unit("fig6/cross_validated", version=1, about="cross-validation of {seed_name}, seed {network_seed}")
def _cross_validated(task: CorruptedTask, /, *, num_folds: int, **_: Any) -> dict[str, Any]:
    """Train a network without each fold, all together on shared batches, and ask it about the fold."""
    generator = task.generator("cross-validation")
    seed = int(torch.randint(2**31 - 1, (), generator=generator))
    folds = StratifiedKFold(num_folds, shuffle=True, random_state=seed)
    labels = task.corrupted.labels.cpu()
    held_out = [torch.from_numpy(fold) for _, fold in folds.split(labels, labels)]
    kept = torch.ones(len(held_out), len(labels), dtype=torch.bool)
    for row, fold in zip(kept, held_out, strict=True):
        row[fold] = False
    weights, hyper = subset_weights(kept), _hyper(task.settings)
    copies = train_ensemble(
        task.initial, task.loss, task.train_data, example_weights=weights, generator=generator, **hyper
    )
    function, probabilities = ModelFunction(task.initial), torch.zeros(len(labels), task.splits.num_outputs)
    with torch.no_grad():
        for fold, position in zip(held_out, copies.parameters, strict=True):
            values = unflatten(position, function.parameters)
            probabilities[fold] = function(values, task.inputs[fold.to(task.inputs.device)]).softmax(1).cpu()
    return {"probabilities": probabilities}
