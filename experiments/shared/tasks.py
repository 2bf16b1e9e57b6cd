"""Tasks as the configs in conf/task describe them: load the data, train the network or take the stored one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn

from curvlab.lab import Run, task_label
from curvlab.lab.data import DataSplits
from curvlab.lab.models import build_model
from curvlab.problem import freeze
from curvlab.training import evaluate, train
from experiments.shared.language_tasks import build_language_task
from experiments.shared.loading import chosen_examples, held_out_examples
from experiments.shared.trained_task import TrainedTask, curvature_indices, without_paths

LOSSES = {"classification": nn.CrossEntropyLoss, "binary": nn.BCEWithLogitsLoss, "regression": nn.MSELoss}


def build_task(run: Run, name: str, settings: DictConfig) -> TrainedTask:
    """Load the data, build the network, train it or take the stored weights, and freeze what the config says.

    Args:
        run: seeds, store, device and progress.
        name: of the task in the config.
        settings: of one task, see `task_settings`: nodes `data`, `model`, `training` (null: the model comes with
            its weights) and `freeze`; `seed_name`, what all its random streams are named after; `curvature_train`,
            how many training examples, drawn at random, the curvature is the mean over (null: all). With a
            `tokenizer` it is a language model's, see `build_language_task`.
    """
    if "tokenizer" in settings:
        return build_language_task(run, name, settings)
    splits: DataSplits = instantiate(settings.data)
    run.record_data(splits.name, splits.checksum)
    model = build_model(
        partial(instantiate, settings.model),
        input_shape=splits.input_shape,
        num_outputs=splits.num_outputs,
        generator=run.generator("model", settings.seed_name),
    ).to(run.device)
    loss = LOSSES[splits.task]()
    key: dict[str, Any] = {
        "seed_name": settings.seed_name,
        "data": {"checksum": splits.checksum},
        "model": without_paths(settings.model),
        "training": without_paths(settings.training),
    }
    if settings.training is not None:
        compute = partial(_trained, run, model, loss, splits.train, settings)
        about = f"training {task_label(name)}"
        stored = run.unit("trained_model", key, compute, version=1, about=about, resumes=True)
        model.load_state_dict({parameter: value.to(run.device) for parameter, value in stored["weights"].items()})
    model.eval()
    num_parameters = freeze(model, normalization=settings.freeze.normalization, biases=settings.freeze.biases)
    indices = curvature_indices(run, splits, settings.curvature_train)
    train_data = chosen_examples(splits, indices, settings.get("loading"))
    key |= {"freeze": without_paths(settings.freeze), "curvature_train": len(indices)}
    measured = run.unit(
        "evaluation",
        key,
        partial(_evaluated, model, loss, train_data, held_out_examples(splits, settings.get("loading"))),
        version=1,
        about=f"losses of {task_label(name)}",
    )
    return TrainedTask(
        label=task_label(name),
        seed_name=settings.seed_name,
        model=model,
        loss=loss,
        splits=splits,
        train=train_data,
        num_train=len(indices),
        train_indices=indices,
        key=key,
        num_parameters=num_parameters,
        train_loss=measured["train_loss"],
        test_accuracy=measured["test_accuracy"],
    )


def _trained(  # noqa: PLR0917
    run: Run, model: nn.Module, loss: nn.Module, data: Any, settings: DictConfig, checkpoints: Path
) -> dict[str, Any]:
    history = train(
        model,
        loss,
        data,
        **{str(setting): value for setting, value in settings.training.items()},
        generator=run.generator("training", settings.seed_name),
        checkpoint=checkpoints / "training.pt",
        progress=partial(run.progress, description=f"train {settings.seed_name}"),
    )
    weights: dict[str, Tensor] = model.state_dict()
    return {"weights": weights, "losses": list(history.losses)}


def _evaluated(model: nn.Module, loss: nn.Module, train_data: Any, test_data: Any) -> dict[str, Any]:
    return {
        "train_loss": evaluate(model, loss, train_data).loss,
        "test_accuracy": evaluate(model, loss, test_data).accuracy,
    }
