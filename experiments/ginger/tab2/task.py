"""The summarisation task: pairs as tokens, and a pretrained encoder-decoder that every fine-tuning starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from curvlab.lab import Run, task_label
from curvlab.lab.data import (
    SummaryCorpus,
    SummarySplits,
    copying_pairs,
    pretrained_tokenizer,
    summary_splits,
    train_tokenizer,
)
from curvlab.lab.models import EncoderDecoder, add_adapters, build_model
from curvlab.training import evaluate, train_language_model
from experiments.shared.task import without_paths

WEIGHTS = ("full", "lora")


@dataclass(frozen=True)
class SummaryTask:
    """Pairs, and a network to fine-tune.

    Attributes:
        label: what tables and figures call it.
        seed_name: what its random streams are named after.
        splits: pairs as tokens.
        model: Hydra node.
        base: weights that every fine-tuning starts from; None: the model comes with them.
        adapters: `rank` and `alpha` of LoRA.
        batch_size: pairs of a step.
        measuring: `batch_size`, `num_train` (pairs that the training loss is the mean over), `num_beams`.
        start_loss: of the validation pairs before any fine-tuning, the same in both halves of the table.
        key: identifies all but `measuring` in the store.
    """

    label: str
    seed_name: str
    splits: SummarySplits
    model: DictConfig
    base: Mapping[str, Tensor] | None
    adapters: Mapping[str, Any]
    batch_size: int
    measuring: Mapping[str, Any]
    start_loss: float
    key: dict[str, Any]

    def build(self, run: Run, weights: str, seed: int | str) -> EncoderDecoder:
        """Return the network at the start of a fine-tuning; `seed` is that of the adapters' own random start.

        Args:
            run: seeds, device.
            weights: which are trained: "full", all of them; "lora", adapters alone.
            seed: shared by all optimizers.
        """
        if weights not in WEIGHTS:
            raise ValueError(f"unknown weights {weights!r}: choose {' or '.join(WEIGHTS)}")
        model = _built(run, self.model, self.splits, self.seed_name)
        if self.base is not None:
            model.load_state_dict(self.base)
        if weights == "lora":
            add_adapters(model, **self.adapters, generator=run.generator("adapters", self.seed_name, seed))
        return model.to(run.device)

    def steps_per_epoch(self) -> int:
        """Return the number of batches of a pass over the training pairs."""
        return -(-len(self.splits.train[1]) // self.batch_size)


def load_summary_task(run: Run, name: str, settings: DictConfig) -> SummaryTask:
    """Load the pairs, train the tokenizer, pretrain the network or take the stored one.

    Args:
        run: seeds, store, device and progress.
        name: of the task in the config.
        settings: of one task, see `task_settings`: nodes `data` (a SummaryCorpus), `tokenizer` (`vocabulary_size`,
            or `pretrained`: a name on the hub), `source_length`, `target_length`, `prefix`, `model`,
            `pretraining` (null: the model comes with its weights; `num_words`, `num_copied`, `max_stretches` of
            `copying_pairs`, and what `train_language_model` takes), `adapters`, `batch_size`, `measuring`;
            `seed_name`.
    """
    corpus: SummaryCorpus = instantiate(settings.data)
    run.record_data(corpus.name, corpus.checksum)
    key: dict[str, Any] = {"data": corpus.checksum, "tokenizer": without_paths(settings.tokenizer)}
    tokenizer = run.unit("summary_tokenizer", key, partial(_tokenizer, corpus, settings.tokenizer), version=1)
    shape = {name: settings[name] for name in ("source_length", "target_length", "prefix")}
    splits = summary_splits(corpus, tokenizer["json"], **shape)
    key |= shape | {
        "model": without_paths(settings.model),
        "pretraining": without_paths(settings.pretraining),
        "seed_name": settings.seed_name,
    }
    base = None
    if settings.pretraining is not None:
        compute = partial(_pretrained, run, name, corpus, splits, settings)
        base = run.unit("summary_base", key, compute, version=1)["weights"]
    compute = partial(_start_loss, run, settings, splits, base)
    start = run.unit("summary_start", key, compute, version=1)
    adapters: Any = OmegaConf.to_container(settings.adapters)
    return SummaryTask(
        label=task_label(name),
        seed_name=settings.seed_name,
        splits=splits,
        model=settings.model,
        base=base,
        adapters=adapters,
        batch_size=settings.batch_size,
        measuring=settings.measuring,
        start_loss=start["validation_loss"],
        key=key | {"adapters": adapters, "batch_size": settings.batch_size},
    )


def _tokenizer(corpus: SummaryCorpus, settings: DictConfig) -> dict[str, Any]:
    pretrained = settings.get("pretrained")
    if pretrained is not None:
        return {"json": pretrained_tokenizer(pretrained)}
    texts = [*corpus.text, *(summary for _, summary in corpus.train)]
    return {"json": train_tokenizer(texts, vocabulary_size=settings.vocabulary_size)}


def _built(run: Run, model: DictConfig, splits: SummarySplits, seed_name: str) -> EncoderDecoder:
    built = build_model(
        partial(instantiate, model, padding=splits.padding, end=splits.end),
        input_shape=splits.input_shape,
        num_outputs=splits.num_outputs,
        generator=run.generator("start", seed_name),
    )
    if not isinstance(built, EncoderDecoder):
        raise TypeError(f"summaries need an encoder-decoder, got {type(built).__name__}: choose model=t5")
    return built


def _start_loss(
    run: Run, settings: DictConfig, splits: SummarySplits, base: Mapping[str, Tensor] | None
) -> dict[str, Any]:
    model = _built(run, settings.model, splits, settings.seed_name)
    if base is not None:
        model.load_state_dict(base)
    found = evaluate(
        model.to(run.device),
        nn.CrossEntropyLoss(),
        splits.validation,
        batch_size=settings.measuring.batch_size,
    )
    return {"validation_loss": found.loss}


def _pretrained(
    run: Run, name: str, corpus: SummaryCorpus, splits: SummarySplits, settings: DictConfig
) -> dict[str, Any]:
    """Train the network to copy what stretches of the training documents begin with."""
    own: dict[str, Any] = {str(key): value for key, value in settings.pretraining.items()}
    stretches = {key: own.pop(key) for key in ("num_words", "num_copied", "max_stretches")}
    pairs = copying_pairs(corpus.text, **stretches)
    model = _built(run, settings.model, splits, settings.seed_name).to(run.device)
    history = train_language_model(
        model,
        splits.encode(pairs),
        **own,
        generator=run.generator("pretraining", settings.seed_name),
        progress=run.bar(f"pretrain {task_label(name)}"),
    )
    weights = {parameter: value.cpu() for parameter, value in model.state_dict().items()}
    return {"weights": weights, "losses": list(history.losses)}
