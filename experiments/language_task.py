"""The trained language model that a target examines: text, tokenizer, model and training from one config."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn

from curvlab.data import TextCorpus, TokenSplits, pretrained_tokenizer, stack, token_splits, train_tokenizer
from curvlab.models import build_model, freeze
from curvlab.runs import Run
from curvlab.training import evaluate_language_model, train_language_model
from experiments.task import Task, without_paths

VERSION = 1  # of training and evaluation: raise it when their meaning changes


def build_language_task(run: Run, cfg: DictConfig) -> Task:
    """Load the text, train its tokenizer and model or take the stored ones, and freeze what the config says.

    The loss of the task is nn.CrossEntropyLoss(), the mean over predicted tokens; `train` is a pair of tensors of
    sequences, (N, T) tokens and (N, T) next tokens; `splits` is a TokenSplits, which also encodes other text.

    Args:
        run: seeds, store, device and progress.
        cfg: `name`, a label; nodes `data` (a TextCorpus), `tokenizer` (`vocabulary_size`, or `pretrained`: a name
            on the hub), `sequence_length`, `model`, `training` (null: the model comes with its weights), `freeze`;
            `model_seed`, of the initial weights and the order of training; `curvature_train`, how many training
            sequences, drawn at random, the curvature is the mean over (null: all). One such config for each
            preset stands in conf/lissa/language.
    """
    corpus: TextCorpus = instantiate(cfg.data)
    run.record_data(corpus.name, corpus.checksum)
    tokenizer_key = {"data": corpus.checksum, "tokenizer": without_paths(cfg.tokenizer)}
    tokenizer = run.unit("tokenizer", tokenizer_key, partial(_tokenizer, corpus, cfg.tokenizer))["json"]
    splits = token_splits(corpus, tokenizer, sequence_length=cfg.sequence_length)
    model = build_model(
        partial(instantiate, cfg.model),
        input_shape=splits.input_shape,
        num_outputs=splits.num_outputs,
        generator=run.generator("language model", cfg.model_seed),
    ).to(run.device)
    key: dict[str, Any] = tokenizer_key | {
        "sequence_length": cfg.sequence_length,
        "model": without_paths(cfg.model),
        "training": without_paths(cfg.training),
        "model_seed": cfg.model_seed,
        "version": VERSION,
    }
    if cfg.training is not None:
        stored = run.unit("trained_language_model", key, partial(_trained, run, model, splits, cfg))
        model.load_state_dict({name: value.to(run.device) for name, value in stored["weights"].items()})
    model.eval()
    num_parameters = freeze(model, normalization=cfg.freeze.normalization, biases=cfg.freeze.biases)
    indices = torch.arange(len(splits.train))  # type: ignore[arg-type]  # a TensorDataset
    if cfg.curvature_train is not None and cfg.curvature_train < len(indices):
        order = torch.randperm(len(indices), generator=run.generator("curvature_train", splits.name))
        indices = order[: cfg.curvature_train].sort().values
    train_data = stack(splits.train, indices)
    key |= {"freeze": without_paths(cfg.freeze), "curvature_train": len(indices)}
    measured = run.unit("language_evaluation", key, partial(_evaluated, model, train_data, splits))
    return Task(
        name=cfg.name,
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


def perplexities(run: Run, task: Task) -> dict[str, float]:
    """Return exp of the mean loss a token, on the curvature's sequences and on (some of) the test text."""
    measured = run.unit("language_evaluation", task.key, lambda: _evaluated(task.model, task.train, task.splits))
    return {part: float(torch.tensor(measured[f"{part}_loss"]).exp()) for part in ("train", "test")}


def _tokenizer(corpus: TextCorpus, cfg: DictConfig) -> dict[str, Any]:
    pretrained = cfg.get("pretrained")
    if pretrained is not None:
        return {"json": pretrained_tokenizer(pretrained)}
    return {"json": train_tokenizer(corpus.train, vocabulary_size=cfg.vocabulary_size)}


def _trained(run: Run, model: nn.Module, splits: TokenSplits, cfg: DictConfig) -> dict[str, Any]:
    history = train_language_model(
        model,
        splits.train,
        **{str(setting): value for setting, value in cfg.training.items()},
        generator=run.generator("language model training", cfg.model_seed),
        progress=partial(run.progress, description=f"train {cfg.name}"),
    )
    weights: dict[str, Tensor] = model.state_dict()
    return {"weights": weights, "losses": list(history.losses)}


def _evaluated(model: nn.Module, train_data: Any, splits: Any) -> dict[str, Any]:
    test = evaluate_language_model(model, splits.test)
    return {
        "train_loss": evaluate_language_model(model, train_data).loss,
        "test_loss": test.loss,
        "test_accuracy": test.accuracy,
    }
