"""The network that is scored, and its retrainings."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from curvlab.influence import ensemble_measurements
from curvlab.lab import Run
from curvlab.linalg import flatten
from curvlab.training import (
    AdamRule,
    BatchOrder,
    EnsembleLosses,
    RunLength,
    SGDRule,
    TrainingRun,
    descend,
    shuffled_batches,
    train,
    train_ensemble,
)
from experiments.shared.gauges import work_clock
from experiments.shared.task import Task, files_by_name


@dataclass(frozen=True)
class Trained:
    """The network after training in one order of the batches.

    Attributes:
        model: in eval mode.
        run: how it came there.
        length: how far it went along a gradient, of which influence has its damping.
        seconds: of the training.
        train_loss: mean over the training set.
    """

    model: nn.Module
    run: TrainingRun
    length: RunLength
    seconds: float
    train_loss: float


class Network:
    """One task: its data, its initial network, and trainings of it.

    Attributes:
        label: what tables and figures call it.
        key: identifies it in the store.
        loss: mean over examples.
        train: (inputs, targets).
        test: the queries, likewise.

    Args:
        run: seeds, store and device.
        name: of the task in the config.
        settings: of the task, see conf/benchmarks/attribution.yaml.
    """

    def __init__(self, run: Run, name: str, settings: DictConfig) -> None:
        task = Task.load(run, name, settings)
        self.run, self.settings, self.label, self.loss, self._task = run, settings, task.label, task.loss, task
        size = min(task.num_train, settings.get("num_sequences") or task.num_train)
        self.train: tuple[Tensor, Tensor] = task.pair("train", torch.arange(size))
        order = torch.randperm(len(task.splits.test), generator=run.generator("queries", task.splits.name))  # type: ignore[arg-type]
        self.queries = order[: settings.num_queries].sort().values
        self.test: tuple[Tensor, Tensor] = task.pair("test", self.queries)
        self.initial = self._start()
        cut = task.data_key | {"num_sequences": settings.num_sequences} if task.is_language else None
        self.key: dict[str, Any] = {
            "seed_name": task.seed_name,
            "data": cut or task.splits.checksum,
            "model": files_by_name(settings.model),
            "training": files_by_name(settings.training),
        }
        self._hyper = {
            k: settings.training[k]
            for k in ("lr", "momentum", "weight_decay", "optimizer")
            if k in settings.training
        }

    def _start(self, *names: str | int) -> nn.Module:
        return self._task.build(self._task.generator("model", *names))

    def at(self, seed: int) -> Self:
        """Return the same task from the start of another seed; 0 is this one."""
        other = copy.copy(self)
        if seed:
            other.initial, other.key = self._start(seed), self.key | {"start": seed}
        return other

    @property
    def num_train(self) -> int:
        """N, training examples."""
        return len(self.train[1])

    def batches(self, order: int) -> list[Tensor]:
        """Return the batches of one order, all epochs."""
        return shuffled_batches(
            self.num_train,
            batch_size=self.settings.training.batch_size,
            num_epochs=self.settings.training.num_epochs,
            generator=self.run.generator("order", self.settings.seed_name, order),
        )

    def trained(self, order: int) -> Trained:
        """Return the network trained on everything in one order."""
        key = self.key | {"order": order}
        stored = self.run.unit("attribution/trained", key, partial(self._train, order), version=1)
        model = copy.deepcopy(self.initial)
        model.load_state_dict({name: value.to(self.run.device) for name, value in stored["weights"].items()})
        decay = self._hyper.get("weight_decay", 0.0)
        adam = self._hyper.get("optimizer") == "adam"
        rule = AdamRule(weight_decay=decay) if adam else SGDRule(self._hyper["momentum"], decay)
        start = flatten(self.initial.parameters()).detach()
        rates = tuple(stored["learning_rates"])
        training = TrainingRun(start, tuple(self.batches(order)), rates, rule)
        if adam:
            found = self.run.unit("attribution/rates", key, partial(self._effective_rates, training), version=1)
            length = RunLength(tuple(found["rates"]), weight_decay=decay)
        else:
            length = training.length()
        return Trained(model.eval(), training, length, stored["seconds"], stored["train_loss"])

    def _effective_rates(self, training: TrainingRun) -> dict[str, Any]:
        """Return how far each step of Adam goes along its gradient.

        Adam divides coordinate i by √v_i + ε: along a lasting gradient g it moves by lr Σ g_i² / (√v_i + ε) / ‖g‖²
        times what SGD at rate 1 does. g is the step's, v has its bias corrected.
        """
        model, rates = copy.deepcopy(self.initial).eval(), []
        parameters, rule = list(model.parameters()), training.rule
        assert isinstance(rule, AdamRule)
        state = (training.start, *(torch.zeros_like(training.start) for _ in range(rule.num_buffers)))
        for step, (batch, lr) in enumerate(zip(training.batches, training.learning_rates, strict=True), start=1):
            vector_to_parameters(state[0], parameters)
            inputs, targets = (part[batch.to(part.device)] for part in self.train)
            gradient = flatten(torch.autograd.grad(self.loss(model(inputs), targets), parameters))
            state = rule.update(state, gradient, lr=lr, step=step)
            root = (state[2] / (1 - rule.betas[1] ** step)).sqrt() + rule.eps
            rates.append(float(lr * (gradient.square() / root).sum() / gradient.square().sum()))
        return {"rates": rates}

    def _train(self, order: int) -> dict[str, Any]:
        generator = self.run.generator("training", self.settings.seed_name, order)
        batches, size = self.batches(order), self.settings.training.batch_size
        # What PyTorch loads for a first step is no training's.
        train(
            copy.deepcopy(self.initial),
            self.loss,
            self.train,
            batches=batches[:1],
            batch_size=size,
            generator=torch.Generator(),
            **self._hyper,
        )
        model, clock = copy.deepcopy(self.initial), work_clock(self.run.device)
        start = clock()
        history = train(
            model,
            self.loss,
            self.train,
            num_epochs=self.settings.training.num_epochs,
            batches=batches,
            batch_size=size,
            generator=generator,
            **self._hyper,
        )
        seconds = clock() - start
        end = flatten(model.parameters()).detach()[None]
        return {
            "weights": model.state_dict(),
            "learning_rates": list(history.learning_rates),
            "seconds": seconds,
            "train_loss": float(ensemble_measurements(model, self.loss, self.train, end).mean()),
        }

    def retrained_losses(self, weights: Tensor, order: int) -> dict[str, Any]:
        """Return the queries' losses after training with each row of weights, (K, N) -> (K, M), and seconds."""
        clock, rows = work_clock(self.run.device), []
        start = clock()
        for some in weights.split(self.settings.copies_at_once):
            copies = train_ensemble(
                self.initial,
                self.loss,
                self.train,
                example_weights=some,
                num_epochs=self.settings.training.num_epochs,
                batch_size=self.settings.training.batch_size,
                batches=self.batches(order),
                generator=self.run.generator("training", self.settings.seed_name, order),
                **self._hyper,
            )
            rows.append(ensemble_measurements(self.initial, self.loss, self.test, copies.parameters))
        return {"losses": torch.cat(rows), "seconds": clock() - start}

    def losses_of(self, model: nn.Module) -> Tensor:
        """Return the queries' losses under one network, (M,)."""
        own = flatten(model.parameters()).detach()[None]
        return ensemble_measurements(model, self.loss, self.test, own)[0]

    def losses_alone(self, subsets: Tensor, seed: int) -> dict[str, Any]:
        """Return the queries' losses after training on each subset alone, (K, N) -> (K, M), and seconds.

        Every copy has a start and an order of its own, and goes over its subset for as many epochs, in batches of
        the same size; the subsets have one size.
        """
        clock, rows, settings = work_clock(self.run.device), [], self.settings
        start, losses = clock(), EnsembleLosses(self.initial, self.loss, self.train)
        generator = self.run.generator("alone", settings.seed_name, seed)
        members = torch.stack(
            [s.nonzero().flatten()[torch.randperm(int(s.sum()), generator=generator)] for s in subsets]
        )
        starts = torch.stack(
            [flatten(self._start("alone", seed, k).parameters()).detach() for k in range(len(subsets))]
        )
        for some, own in zip(
            members.split(settings.copies_at_once), starts.split(settings.copies_at_once), strict=True
        ):
            sizes = {"batch_size": settings.training.batch_size, "num_epochs": settings.training.num_epochs}
            batches = shuffled_batches(some.shape[1], **sizes, generator=generator)

            def gradient(positions: Tensor, places: Tensor, some: Tensor = some) -> tuple[Tensor, Tensor]:
                batch = losses.batch(some.to(places.device)[:, places])
                together = losses.vmap_pays(len(positions), self.train[0][: places.numel()].numel())
                found, pieces = losses.losses_and_gradients(positions, batch, shared=False, by_vmap=together)
                return found, torch.cat([piece.flatten(1) for piece in pieces], dim=1)

            order = BatchOrder(some.shape[1], **sizes, given=batches)
            copies = descend(own.to(self.run.device), gradient, order, **self._hyper)
            rows.append(ensemble_measurements(self.initial, self.loss, self.test, copies.parameters))
        return {"losses": torch.cat(rows), "seconds": clock() - start}
