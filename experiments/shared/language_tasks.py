"""The trained language model that a target examines: text, tokenizer, model and training of one conf/task."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn

from curvlab.lab import Run, task_label
from curvlab.lab.data import TextCorpus, TokenSplits, pretrained_tokenizer, token_splits, train_tokenizer
from curvlab.lab.models import build_model
from curvlab.lab.runs.over_ranks import shard
from curvlab.problem import freeze, stack
from curvlab.training import evaluate, train_language_model
from experiments.shared.trained_task import TrainedTask, curvature_indices, without_paths


def build_language_task(run: Run, name: str, settings: DictConfig) -> TrainedTask:
    """Load the text, train its tokenizer and model or take the stored ones, and freeze what the config says.

    The loss of the task is nn.CrossEntropyLoss(), the mean over predicted tokens; `train` is a pair of tensors of
    sequences, (N, T) tokens and (N, T) next tokens; `splits` is a TokenSplits, which also encodes other text.

    Args:
        run: seeds, store, device and progress.
        name: of the task.
        settings: of the task, see `task_settings`: nodes `data` (a TextCorpus), `tokenizer` (`vocabulary_size`, or
            `pretrained`: a name on the hub), `sequence_length`, `model`, `training` (null: the model comes with
            its weights), `freeze`; `model_seed`, of the initial weights and the order of training;
            `curvature_train`, how many training sequences, drawn at random, the curvature is the mean over (null:
            all); `sharded`: whether torchrun's processes cut up the parameters, for models that one device cannot
            hold; `seed_name`, what the random streams of all that measures the model are named after.
    """
    corpus: TextCorpus = instantiate(settings.data)
    run.record_data(corpus.name, corpus.checksum)
    tokenizer_key = {"data": corpus.checksum, "tokenizer": without_paths(settings.tokenizer)}
    tokenizer = run.unit(
        "tokenizer",
        tokenizer_key,
        partial(_tokenizer, corpus, settings.tokenizer),
        version=1,
        about=f"tokenizer of {corpus.name}",
    )
    splits = token_splits(corpus, tokenizer["json"], sequence_length=settings.sequence_length)
    model = build_model(
        partial(instantiate, settings.model),
        input_shape=splits.input_shape,
        num_outputs=splits.num_outputs,
        generator=run.generator("language model", settings.model_seed),
    )
    sharded = settings.get("sharded", False)
    model = model if sharded else model.to(run.device)
    key: dict[str, Any] = tokenizer_key | {
        "sequence_length": settings.sequence_length,
        "model": without_paths(settings.model),
        "training": without_paths(settings.training),
        "model_seed": settings.model_seed,
    }
    if settings.training is not None:
        train = partial(_trained, run, name, model, splits, settings)
        about = f"training {_described(name, settings)}"
        stored = run.unit("trained_language_model", key, train, version=1, about=about, resumes=True)
        model.load_state_dict({parameter: value.to(run.device) for parameter, value in stored["weights"].items()})
    model.eval()
    num_parameters = freeze(model, normalization=settings.freeze.normalization, biases=settings.freeze.biases)
    model = shard(model, run.device) if sharded else model
    indices = curvature_indices(run, splits, settings.curvature_train)
    train_data = stack(splits.train, indices)
    key |= {
        "freeze": without_paths(settings.freeze),
        "curvature_train": len(indices),
        "seed_name": settings.seed_name,
    }
    measured = run.unit(
        "language_evaluation",
        key,
        partial(_evaluated, model, train_data, splits),
        version=1,
        about=f"losses of {_described(name, settings)}",
    )
    return TrainedTask(
        label=task_label(name),
        seed_name=settings.seed_name,
        model=model,
        loss=nn.CrossEntropyLoss(),
        splits=splits,
        train=train_data,
        num_train=len(indices),
        train_indices=indices,
        key=key,
        num_parameters=num_parameters,
        train_loss=measured["train_loss"],
        test_accuracy=measured["test_accuracy"],
    )


def perplexities(run: Run, task: TrainedTask) -> dict[str, float]:
    """Return exp of the mean loss a token, on the curvature's sequences and on (some of) the test text."""
    measured = run.unit(
        "language_evaluation",
        task.key,
        partial(_evaluated, task.model, task.train, task.splits),
        version=1,
        about=f"losses of {task.label}",
    )
    return {part: float(torch.tensor(measured[f"{part}_loss"]).exp()) for part in ("train", "test")}


def _tokenizer(corpus: TextCorpus, settings: DictConfig) -> dict[str, Any]:
    pretrained = settings.get("pretrained")
    if pretrained is not None:
        return {"json": pretrained_tokenizer(pretrained)}
    return {"json": train_tokenizer(corpus.train, vocabulary_size=settings.vocabulary_size)}


def _described(name: str, settings: DictConfig) -> str:
    return f"{task_label(name)}, model seed {settings.model_seed}"


def _trained(  # noqa: PLR0917
    run: Run, name: str, model: nn.Module, splits: TokenSplits, settings: DictConfig, checkpoints: Path
) -> dict[str, Any]:
    history = train_language_model(
        model,
        splits.train,
        **{str(setting): value for setting, value in settings.training.items()},
        generator=run.generator("language model training", settings.model_seed),
        checkpoint=checkpoints / "training.pt",
        progress=partial(run.progress, description=f"train {task_label(name)}"),
    )
    weights: dict[str, Tensor] = model.state_dict()
    return {"weights": weights, "losses": list(history.losses)}


def _evaluated(model: nn.Module, train_data: Any, splits: Any) -> dict[str, Any]:
    loss = nn.CrossEntropyLoss()
    test = evaluate(model, loss, splits.test, batch_size=32)
    return {
        "train_loss": evaluate(model, loss, train_data, batch_size=32).loss,
        "test_loss": test.loss,
        "test_accuracy": test.accuracy,
    }
