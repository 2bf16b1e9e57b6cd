"""The network that was trained on wrong labels, its margins on the way, and its cross-validation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn

from curvlab.influence import CorruptedLabels, corrupt_labels, margins, subset_weights
from curvlab.lab import Run, task_label
from curvlab.lab.data import DataSplits
from curvlab.lab.models import build_model
from curvlab.linalg import unflatten
from curvlab.problem import ModelFunction, stack
from curvlab.training import evaluate, train, train_ensemble
from experiments.shared.task import without_paths


@dataclass(frozen=True)
class CorruptedTask:
    """One task and seed: data with wrong labels, and trainings on them.

    Attributes:
        run: seeds, store and device.
        label: what tables and figures call the task.
        settings: of the task, see conf/pbrf/fig6/target.yaml.
        seed: of the wrong labels, the initial weights and the order of batches.
        splits: the data as they are.
        inputs: (N, ...), of the training set.
        corrupted: (N,) labels, and which of them are wrong.
        initial: the network before training.
        key: all that the trained network depends on.
    """

    run: Run
    label: str
    settings: DictConfig
    seed: int
    splits: DataSplits
    inputs: Tensor
    corrupted: CorruptedLabels
    initial: nn.Module
    key: dict[str, Any]

    @property
    def train_data(self) -> tuple[Tensor, Tensor]:
        """Inputs, and labels as given."""
        return self.inputs, self.corrupted.labels

    @property
    def num_train(self) -> int:
        """N."""
        return len(self.inputs)

    @property
    def loss(self) -> nn.Module:
        """Mean over examples."""
        return nn.CrossEntropyLoss()

    @cached_property
    def model(self) -> nn.Module:
        """The network after training."""
        self.initial.load_state_dict({k: v.to(self.run.device) for k, v in self.trained["weights"].items()})
        return self.initial.eval()

    @cached_property
    def trained(self) -> dict[str, Any]:
        """Return weights, the mean margin over the epochs (N,), and how well the network does."""
        about = f"training {self.label}, seed {self.seed}"
        return self.run.unit("fig6/trained", self.key, partial(_trained, self), version=1, about=about)

    @cached_property
    def outputs(self) -> Tensor:
        """Logits of the trained network on the training set, (N, C)."""
        with torch.no_grad():
            return torch.cat([self.model(some) for some in self.inputs.split(1024)])

    @property
    def cross_validated(self) -> Tensor:
        """Probabilities by networks that did not see the example, (N, C)."""
        key = self.key | {"num_folds": self.settings.num_folds}
        about = f"cross-validation of {self.label}, seed {self.seed}"
        found = self.run.unit("fig6/cross_validated", key, partial(_cross_validated, self), version=1, about=about)
        return found["probabilities"].to(self.inputs)

    def generator(self, name: str) -> torch.Generator:
        """Return the stream `name` of this task and seed."""
        return self.run.generator(name, self.settings.seed_name, self.seed)


def load_task(run: Run, name: str, settings: DictConfig, seed: int) -> CorruptedTask:
    """Load the data, corrupt a fraction of the training labels, and build the network."""
    splits: DataSplits = instantiate(settings.data)
    if splits.task != "classification":
        raise ValueError(f"data={splits.name} has no class labels to corrupt: it is for {splits.task}")
    run.record_data(splits.name, splits.checksum)
    inputs, labels = stack(splits.train, range(len(splits.train)))  # type: ignore[arg-type]  # map-style
    corrupted = corrupt_labels(
        labels,
        num_classes=splits.num_outputs,
        fraction=settings.fraction,
        generator=run.generator("wrong labels", settings.seed_name, seed),
    )
    model = build_model(
        partial(instantiate, settings.model),
        input_shape=splits.input_shape,
        num_outputs=splits.num_outputs,
        generator=run.generator("model", settings.seed_name, seed),
    )
    device = run.device
    return CorruptedTask(
        run,
        label=task_label(name),
        settings=settings,
        seed=seed,
        splits=splits,
        inputs=inputs.to(device),
        corrupted=CorruptedLabels(corrupted.labels.to(device), corrupted.mislabelled.to(device)),
        initial=model.to(device),
        key={
            "seed_name": settings.seed_name,
            "network_seed": seed,
            "data": splits.checksum,
            "fraction": settings.fraction,
            "model": without_paths(settings.model),
            "training": without_paths(settings.training),
        },
    )


def _hyper(settings: DictConfig) -> dict[str, Any]:
    names = ("num_epochs", "batch_size", "lr", "optimizer", "momentum", "weight_decay")
    return {name: settings.training[name] for name in names if name in settings.training}


def _trained(task: CorruptedTask) -> dict[str, Any]:
    model, labels = task.initial, task.corrupted.labels

    def seen(epoch: int, loss: float) -> dict[str, Tensor]:
        with torch.no_grad():
            outputs = torch.cat([model(some) for some in task.inputs.split(1024)])
        return {"margins": margins(outputs, labels)}

    history = train(
        model,
        task.loss,
        task.train_data,
        **_hyper(task.settings),
        generator=task.generator("training"),
        on_epoch_end=seen,
    )
    with torch.no_grad():
        outputs = torch.cat([model(some) for some in task.inputs.split(1024)])
    wrong = task.corrupted.mislabelled
    losses = nn.functional.cross_entropy(outputs, labels, reduction="none")
    return {
        "weights": model.state_dict(),
        "area_under_margin": torch.stack([r["margins"] for r in history.records if r is not None]).mean(0),
        "train_loss": float(losses.mean()),
        "wrong_label_loss": float(losses[wrong].mean()),
        "wrong_labels_predicted": float((outputs.argmax(1) == labels)[wrong].double().mean()),
        "test_accuracy": evaluate(model, task.loss, task.splits.test).accuracy,
    }


def _cross_validated(task: CorruptedTask) -> dict[str, Any]:
    """Train a network without each fold, all together on shared batches, and ask it about the fold."""
    generator = task.generator("cross-validation")
    seed = int(torch.randint(2**31 - 1, (), generator=generator))
    folds = StratifiedKFold(task.settings.num_folds, shuffle=True, random_state=seed)
    labels = task.corrupted.labels
    held_out = [torch.from_numpy(fold) for _, fold in folds.split(labels.cpu(), labels.cpu())]
    kept = torch.ones(len(held_out), task.num_train, dtype=torch.bool)
    for row, fold in zip(kept, held_out, strict=True):
        row[fold] = False
    copies = train_ensemble(
        task.initial,
        task.loss,
        task.train_data,
        example_weights=subset_weights(kept),
        generator=generator,
        **_hyper(task.settings),
    )
    function = ModelFunction(task.initial)
    probabilities = torch.zeros(task.num_train, task.splits.num_outputs)
    with torch.no_grad():
        for fold, position in zip(held_out, copies.parameters, strict=True):
            values = unflatten(position, function.parameters)
            probabilities[fold] = function(values, task.inputs[fold.to(task.inputs.device)]).softmax(1).cpu()
    return {"probabilities": probabilities}
