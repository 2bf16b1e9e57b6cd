"""Summaries by an encoder-decoder: pairs as tokens, a pretrained start, one fine-tuning, its cost, ROUGE.

for task in SummaryTask.each(run, cfg):
    optimizer = racer.with_rank(4, lr=0.05)
    found = fine_tuned(task, weights="lora", optimizer=optimizer, num_steps=80, repeat=0)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from curvlab.lab import Run, unit
from curvlab.lab.data import (
    SummaryCorpus,
    SummarySplits,
    copying_pairs,
    pretrained_tokenizer,
    summary_splits,
    train_tokenizer,
)
from curvlab.lab.models import EncoderDecoder, add_adapters
from curvlab.training import TrainingBatch, TrainingDivergedError, evaluate, train, train_language_model
from experiments.ginger.optimizers import clipped_shares, counted_step, make_optimizer
from experiments.shared.task import Task, files_by_name

WEIGHTS = ("full", "lora")
KINDS = ("rouge1", "rouge2", "rougeL")
HIGHER = 1.5  # a validation loss so many times that at the start has diverged, though it is a number
NUM_EXAMPLES = 3  # summaries that are kept to be read


@dataclass(frozen=True)
class SummaryTask(Task):
    """Pairs, and a network to fine-tune.

    Reads of the settings, beside `data` (a SummaryCorpus), `model` and `seed_name`: `tokenizer`
    (`vocabulary_size`, or `pretrained`: a name on the hub); `source_length`, `target_length`, `prefix`;
    `pretraining` (null: the model comes with its weights; `num_words`, `num_copied`, `max_stretches` of
    `copying_pairs`, and what `train_language_model` takes); `adapters` (`rank` and `alpha` of LoRA); `batch_size`;
    `measuring` (`batch_size`, `num_train`: pairs that the training loss is the mean over, `num_beams`).

    Attributes:
        splits: pairs as tokens.
        corpus: the pairs' texts.
    """

    splits: SummarySplits  # type: ignore[assignment]  # pairs in place of examples or stretches of text
    corpus: SummaryCorpus

    @classmethod
    def load(cls, run: Run, name: str, settings: DictConfig) -> Self:
        """Load the pairs, train the tokenizer or take the stored one."""
        corpus: SummaryCorpus = instantiate(settings.data)
        run.record_data(corpus.name, corpus.checksum)
        key: dict[str, Any] = {"data": corpus.checksum, "tokenizer": files_by_name(settings.tokenizer)}
        tokenizer = _tokenizer(run, corpus, settings.tokenizer, **key)["json"]
        shape = {name: settings[name] for name in ("source_length", "target_length", "prefix")}
        return cls(run, name, settings, summary_splits(corpus, tokenizer, **shape), key | shape, corpus)

    @property
    def base_key(self) -> dict[str, Any]:
        """Identifies data and pretrained network in the store."""
        return super().key | {"pretraining": files_by_name(self.settings.pretraining)}

    @property
    def key(self) -> dict[str, Any]:
        """Identifies all but `measuring` in the store."""
        own = {"adapters": OmegaConf.to_container(self.settings.adapters), "batch_size": self.settings.batch_size}
        return self.base_key | own

    @cached_property
    def base(self) -> Mapping[str, Tensor] | None:
        """Weights that every fine-tuning starts from, trained or stored; None: the model comes with them."""
        if self.settings.pretraining is None:
            return None
        weights: Mapping[str, Tensor] = _pretrained(self.run, self, **self.base_key)["weights"]
        return weights

    @cached_property
    def start_loss(self) -> float:
        """Of the validation pairs before any fine-tuning, the same in both halves of the table."""
        return float(_start(self.run, self, **self.base_key)["validation_loss"])

    def start(self, weights: str, seed: int | str) -> EncoderDecoder:
        """Return the network at the start of a fine-tuning.

        Args:
            weights: which are trained: "full", all of them; "lora", adapters alone.
            seed: of the adapters' own random start, shared by all optimizers.
        """
        if weights not in WEIGHTS:
            raise ValueError(f"unknown weights {weights!r}: choose {' or '.join(WEIGHTS)}")
        model = self.network(self.base)
        if weights == "lora":
            add_adapters(model, **self.settings.adapters, generator=self.generator("adapters", seed))
        return model.to(self.run.device)

    def network(self, base: Mapping[str, Tensor] | None) -> EncoderDecoder:
        """Return the network, on the CPU, with the weights `base`, or with those that it comes with."""
        start, cpu, splits = self.generator("start"), torch.device("cpu"), self.splits
        built = self.build(start, device=cpu, padding=splits.padding, end=splits.end)
        if not isinstance(built, EncoderDecoder):
            raise TypeError(f"summaries need an encoder-decoder, got {type(built).__name__}: choose model=t5")
        if base is not None:
            built.load_state_dict(base)
        return built

    def mean_loss(self, model: nn.Module, pairs: tuple[Tensor, Tensor]) -> float:
        """Return the mean loss of a token."""
        return evaluate(model, nn.CrossEntropyLoss(), pairs, batch_size=self.settings.measuring.batch_size).loss

    def steps_per_epoch(self) -> int:
        """Return the number of batches of a pass over the training pairs."""
        return -(-len(self.splits.train[1]) // self.settings.batch_size)


@unit("summary_tokenizer", version=2)
def _tokenizer(run: Run, corpus: SummaryCorpus, settings: DictConfig, /, **_: Any) -> dict[str, Any]:
    pretrained = settings.get("pretrained")
    if pretrained is not None:
        return {"json": pretrained_tokenizer(pretrained)}
    texts = [*corpus.text, *(summary for _, summary in corpus.train)]
    return {"json": train_tokenizer(texts, vocabulary_size=settings.vocabulary_size)}


@unit("summary_base", version=2)
def _pretrained(run: Run, task: SummaryTask, /, **_: Any) -> dict[str, Any]:
    """Train the network to copy what stretches of the training documents begin with."""
    own: dict[str, Any] = {str(key): value for key, value in task.settings.pretraining.items()}
    stretches = {key: own.pop(key) for key in ("num_words", "num_copied", "max_stretches")}
    model = task.network(None).to(run.device)
    history = train_language_model(
        model,
        task.splits.encode(copying_pairs(task.corpus.text, **stretches)),
        **own,
        generator=task.generator("pretraining"),
        progress=run.bar(f"pretrain {task.label}"),
    )
    weights = {parameter: value.cpu() for parameter, value in model.state_dict().items()}
    return {"weights": weights, "losses": list(history.losses)}


@unit("summary_start", version=2)
def _start(run: Run, task: SummaryTask, /, **_: Any) -> dict[str, Any]:
    return {"validation_loss": task.mean_loss(task.network(task.base).to(run.device), task.splits.validation)}


# ------------------------------------------------------------------------------------ one fine-tuning
@unit("ginger/fine_tuned", version=2, about="fine-tuning {weights} by {optimizer[optimizer]}, seed {repeat}")
def fine_tuned(
    task: SummaryTask,
    /,
    *,
    weights: str,
    optimizer: Any,
    num_steps: int,
    repeat: int | str,
    measuring: Mapping[str, Any] | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Fine-tune once; return what was measured at the end, and the steps' losses.

    `validation_loss`, infinite where `diverged`; `step_losses` (S,), each of its batch. With `measuring`:
    `test_loss`; `train_loss`, of the leading training pairs, in eval mode; ROUGE of the test summaries (0 where it
    diverged; the losses are nan there), and `examples` that it wrote.

    Args:
        task: pairs and network.
        weights: "full" or "lora".
        optimizer: settings, see `make_optimizer`.
        num_steps: how long; the last pass is cut short.
        repeat: seed of the order of batches and of the adapters, shared by all optimizers. A name serves as well.
        measuring: the task's, to measure on the test set, too.
    """
    model = task.start(weights, repeat)
    stepper, step = make_optimizer(model, optimizer)
    found: dict[str, Any] = {"validation_loss": math.inf, "diverged": True, "step_losses": torch.empty(0)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of steps that were not taken: `diverged` says it
        try:
            history = train(
                model,
                nn.CrossEntropyLoss(),
                task.splits.train,
                num_steps=num_steps,
                batch_size=task.settings.batch_size,
                optimizer=stepper,
                step=step,
                generator=task.generator("batches", repeat),
                progress=task.run.bar(f"{weights} {optimizer['optimizer']}"),
            )
        except TrainingDivergedError:
            pass
        else:
            loss = task.mean_loss(model, task.splits.validation)
            found["step_losses"] = torch.tensor(history.step_losses)
            if loss < HIGHER * task.start_loss:
                found |= {"validation_loss": loss, "diverged": False}
    if measuring is None:
        return found
    if found["diverged"]:
        return found | {"test_loss": math.nan, "train_loss": math.nan, "examples": []} | dict.fromkeys(KINDS, 0.0)
    splits, device, texts = task.splits, task.run.device, []
    for inputs in splits.test[0].split(measuring["batch_size"]):
        length, beams = splits.input_shape[1], measuring["num_beams"]
        texts += splits.decode(model.generate(inputs.to(device), max_length=length, num_beams=beams).cpu())
    inputs, targets = (part[: measuring["num_train"]] for part in splits.train)
    losses = {
        "test_loss": task.mean_loss(model, splits.test),
        "train_loss": task.mean_loss(model, (inputs, targets)),
    }
    return found | losses | {"examples": texts[:NUM_EXAMPLES]} | rouge(texts, splits.test_summaries)


@unit("ginger/fine_tuning_clipped", version=1, about="clipped entries, {weights} (lr {optimizer[lr]:g})")
def clipped(
    task: SummaryTask, /, *, weights: str, optimizer: Any, num_steps: int, repeat: int, **_: Any
) -> dict[str, Any]:
    """Return the share of clipped entries along a fine-tuning: step, share."""
    how = {"num_steps": num_steps, "batch_size": task.settings.batch_size}
    model, generator = task.start(weights, repeat), task.generator("batches", repeat)
    return clipped_shares(model, task.splits.train, optimizer, **how, generator=generator)


@unit("ginger/fine_tuning_cost", version=2, about="cost of a step of {optimizer[optimizer]}, {weights}")
def cost_of_a_step(task: SummaryTask, /, *, weights: str, optimizer: Any, **_: Any) -> dict[str, Any]:
    """Return `flops` and `memory` (bytes, at most alive at one time) of one step, see `counted_step`."""
    device = task.run.device
    batch = TrainingBatch(*(part[: task.settings.batch_size].to(device) for part in task.splits.train))
    return counted_step(task.start(weights, "cost"), batch, optimizer)


def rouge(summaries: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return the mean F measures of ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004) in percent, with Porter's stemmer.

    ROUGE-1 and -2 count shared words and pairs of neighbours, ROUGE-L the longest common subsequence of words.

    Args:
        summaries: written by a model.
        references: written by people, in the same order.
    """
    from rouge_score.rouge_scorer import RougeScorer

    if not references or len(summaries) != len(references):
        raise ValueError(f"there are {len(summaries)} summaries for {len(references)} references: one for each")
    scorer = RougeScorer(list(KINDS), use_stemmer=True)
    found = [scorer.score(reference, own) for reference, own in zip(references, summaries, strict=True)]
    return {kind: 100 * sum(scores[kind].fmeasure for scores in found) / len(found) for kind in KINDS}
