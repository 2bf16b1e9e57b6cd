"""The network that is scored, and its retrainings."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from curvlab.influence import ensemble_measurements
from curvlab.lab import unit
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

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Network(Task):
    """A task with the examples that are scored, the queries, and a start.

    Attributes:
        train: (inputs, targets).
        queries: their places in the test set.
        test: the queries, likewise.
        initial: the network before training.
        start: its seed.
    """

    train: Pair
    queries: Tensor
    test: Pair
    initial: nn.Module
    start: int = 0

    @classmethod
    def of(cls, task: Task) -> Network:
        """Return the network of a task, from its first start; settings: conf/benchmarks/attribution.yaml."""
        size = min(task.num_train, task.settings.get("num_sequences") or task.num_train)
        generator = task.run.generator("queries", task.splits.name)
        order = torch.randperm(len(task.splits.test), generator=generator)  # type: ignore[arg-type]  # map-style
        queries = order[: task.settings.num_queries].sort().values
        train, test = task.pair("train", torch.arange(size)), task.pair("test", queries)
        initial = task.build(task.generator("model"))
        return Network(**vars(task), train=train, queries=queries, test=test, initial=initial)

    @property
    def key(self) -> dict[str, Any]:
        """Identifies it in the store."""
        cut = self.data_key | {"num_sequences": self.settings.num_sequences} if self.is_language else None
        settings = {name: files_by_name(self.settings[name]) for name in ("model", "training")}
        start = {"start": self.start} if self.start else {}
        return {"seed_name": self.seed_name, "data": cut or self.splits.checksum} | settings | start

    @property
    def num_train(self) -> int:
        """N, examples that are scored."""
        return len(self.train[1])

    @property
    def hyper(self) -> dict[str, Any]:
        """What `train` takes of the settings of its training."""
        names = ("lr", "momentum", "weight_decay", "optimizer")
        return {name: self.settings.training[name] for name in names if name in self.settings.training}

    @property
    def passes(self) -> dict[str, Any]:
        """How long it trains."""
        return {name: self.settings.training[name] for name in ("batch_size", "num_epochs")}

    def at(self, seed: int) -> Network:
        """Return the same task from the start of another seed."""
        own: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(Network)}
        if seed != self.start:
            own |= {"start": seed, "initial": self._start(*([seed] if seed else []))}
        return Network(**own)

    def _start(self, *names: str | int) -> nn.Module:
        return self.build(self.generator("model", *names))

    def batches(self, order: int) -> list[Tensor]:
        """Return the batches of one order, all epochs."""
        return shuffled_batches(self.num_train, **self.passes, generator=self.generator("order", order))

    def trained(self, order: int = 0) -> Trained:  # type: ignore[override]  # of every order another network
        """Return the network trained on everything in one order."""
        stored, model = _trained(self, order=order), copy.deepcopy(self.initial)
        model.load_state_dict({name: value.to(self.run.device) for name, value in stored["weights"].items()})
        decay, adam = self.hyper.get("weight_decay", 0.0), self.hyper.get("optimizer") == "adam"
        rule = AdamRule(weight_decay=decay) if adam else SGDRule(self.hyper["momentum"], decay)
        start, rates = flatten(self.initial.parameters()).detach(), tuple(stored["learning_rates"])
        training = TrainingRun(start, tuple(self.batches(order)), rates, rule)
        if adam:
            length = RunLength(tuple(_rates(self, training, order=order)["rates"]), weight_decay=decay)
        else:
            length = training.length()
        own = vars(self.at(self.start)) | {name: stored[name] for name in ("seconds", "train_loss")}
        return Trained(**own, model=model.eval(), training=training, length=length)

    def retrained_losses(self, weights: Tensor, order: int) -> dict[str, Any]:
        """Return the queries' losses after training with each row of weights, (K, N) -> (K, M), and seconds."""
        clock, rows = work_clock(self.run.device), []
        start = clock()
        for some in weights.split(self.settings.copies_at_once):
            given: dict[str, Any] = {"example_weights": some, "batches": self.batches(order)} | self.passes
            generator = self.generator("training", order)
            copies = train_ensemble(
                self.initial, self.loss, self.train, **given, generator=generator, **self.hyper
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
        clock, rows = work_clock(self.run.device), []
        start, losses = clock(), EnsembleLosses(self.initial, self.loss, self.train)
        generator = self.generator("alone", seed)
        members = torch.stack(
            [s.nonzero().flatten()[torch.randperm(int(s.sum()), generator=generator)] for s in subsets]
        )
        networks = (self._start("alone", seed, k) for k in range(len(subsets)))
        starts = torch.stack([flatten(network.parameters()).detach() for network in networks])
        parts = (each.split(self.settings.copies_at_once) for each in (members, starts))
        for some, own in zip(*parts, strict=True):
            batches = shuffled_batches(some.shape[1], **self.passes, generator=generator)

            def gradient(positions: Tensor, places: Tensor, some: Tensor = some) -> tuple[Tensor, Tensor]:
                batch = losses.batch(some.to(places.device)[:, places])
                together = losses.vmap_pays(len(positions), self.train[0][: places.numel()].numel())
                found, pieces = losses.losses_and_gradients(positions, batch, shared=False, by_vmap=together)
                return found, torch.cat([piece.flatten(1) for piece in pieces], dim=1)

            order = BatchOrder(some.shape[1], **self.passes, given=batches)
            copies = descend(own.to(self.run.device), gradient, order, **self.hyper)
            rows.append(ensemble_measurements(self.initial, self.loss, self.test, copies.parameters))
        return {"losses": torch.cat(rows), "seconds": clock() - start}


@dataclass(frozen=True, kw_only=True)
class Trained(Network):
    """The network after training in one order of the batches.

    Attributes:
        model: in eval mode.
        training: how it came there.
        length: how far it went along a gradient, of which influence has its damping.
        seconds: of the training.
        train_loss: mean over the training set.
    """

    model: nn.Module
    training: TrainingRun
    length: RunLength
    seconds: float
    train_loss: float

    @property
    def arguments(self) -> tuple[nn.Module, nn.Module, Pair, Pair]:
        """What scores are functions of: model, loss, training examples and queries."""
        return self.model, self.loss, self.train, self.test


@unit("attribution/trained", version=1, about="training {seed_name}, order {order}")
def _trained(network: Network, /, *, order: int, **_: Any) -> dict[str, Any]:
    batches = network.batches(order)
    fixed: dict[str, Any] = network.hyper | {"batch_size": network.passes["batch_size"]}
    # What PyTorch loads for a first step is no training's.
    first = copy.deepcopy(network.initial)
    train(first, network.loss, network.train, batches=batches[:1], generator=torch.Generator(), **fixed)
    model, clock = copy.deepcopy(network.initial), work_clock(network.run.device)
    generator, num_epochs = network.generator("training", order), network.passes["num_epochs"]
    start = clock()
    history = train(
        model, network.loss, network.train, num_epochs=num_epochs, batches=batches, generator=generator, **fixed
    )
    seconds = clock() - start
    end = flatten(model.parameters()).detach()[None]
    loss = float(ensemble_measurements(model, network.loss, network.train, end).mean())
    found = {"weights": model.state_dict(), "learning_rates": list(history.learning_rates)}
    return found | {"seconds": seconds, "train_loss": loss}


@unit("attribution/rates", version=1, about="length of {seed_name}, order {order}")
def _rates(network: Network, training: TrainingRun, /, **_: Any) -> dict[str, Any]:
    """Return how far each step of Adam goes along its gradient.

    Adam divides coordinate i by √v_i + ε: along a lasting gradient g it moves by lr Σ g_i² / (√v_i + ε) / ‖g‖²
    times what SGD at rate 1 does. g is the step's, v has its bias corrected.
    """
    model, rates = copy.deepcopy(network.initial).eval(), []
    parameters, rule = list(model.parameters()), training.rule
    assert isinstance(rule, AdamRule)
    state = (training.start, *(torch.zeros_like(training.start) for _ in range(rule.num_buffers)))
    for step, (batch, lr) in enumerate(zip(training.batches, training.learning_rates, strict=True), start=1):
        vector_to_parameters(state[0], parameters)
        inputs, targets = (part[batch.to(part.device)] for part in network.train)
        gradient = flatten(torch.autograd.grad(network.loss(model(inputs), targets), parameters))
        state = rule.update(state, gradient, lr=lr, step=step)
        root = (state[2] / (1 - rule.betas[1] ** step)).sqrt() + rule.eps
        rates.append(float(lr * (gradient.square() / root).sum() / gradient.square().sum()))
    return {"rates": rates}


def _retrained(network: Network, weights: Tensor, /, *, order: int = 0, **_: Any) -> dict[str, Any]:
    return network.retrained_losses(weights, order)


halves = unit("attribution/halves", version=1, about="halves of {seed_name}, order {order}")(_retrained)
part_way = unit("attribution/part_way", version=1, about="{share} of the way to halves of {seed_name}")(_retrained)
without_ranked = unit("attribution/removals", version=1, about="{seed_name} without top-ranked")(_retrained)
without_random = unit("attribution/random_removals", version=1, about="{seed_name} without random")(_retrained)
