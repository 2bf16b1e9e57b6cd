"""devinterp's estimator, and its chains with the loss over all the data noted along them.

The sampler's loss of a step is that of the step's own batch. Beside it stands here, at the same weights, the loss
over all the data, so that the difference is the batches' alone: the chain's own wandering is in both.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

Pair = tuple[Tensor, Tensor]


def available(name: str) -> bool:
    """Return whether a method is installed; devinterp 2 is none: its loss takes language models' tokens alone."""
    if not name.startswith("devinterp"):
        return True
    try:
        return int(metadata.version("devinterp").split(".")[0]) < 2
    except metadata.PackageNotFoundError:
        return False


class DivergedError(RuntimeError):
    """A chain of devinterp's has a loss that is not finite, where it stops."""


def devinterp_traces(
    model: nn.Module, data: Pair, setting: Mapping[str, Any], *, seed: int, callbacks: Sequence[Any] = ()
) -> tuple[dict[str, Any], float]:
    """Run `estimate_learning_coeff_with_summary`, chain after chain, with SGLD and cross-entropy.

    Args:
        model: at w0; in eval mode when this returns.
        data: inputs and targets.
        setting: `num_chains`, `num_draws`, `num_burnin_steps`, `batch_size`, `step_size`, `localization`; `nbeta`
            and `initial_loss`, None: devinterp's own; `replacement`, of a batch's examples.
        seed: of all its random numbers.
        callbacks: called after each step.

    Returns:
        Its summary, and the nbeta that it took.

    Raises:
        DivergedError: where a chain's loss is not finite.
    """
    # By name, as the type checker must pass without it.
    sampler, optimizer = (importlib.import_module(f"devinterp.{name}") for name in ("slt.sampler", "optim.sgld"))
    evaluate_ce = importlib.import_module("devinterp.utils").evaluate_ce
    dataset = TensorDataset(*data)
    order = RandomSampler(dataset, replacement=setting["replacement"])
    loader = DataLoader(dataset, setting["batch_size"], sampler=order)
    kwargs = {"lr": setting["step_size"], "localization": setting["localization"]}
    kwargs |= {"nbeta": setting["nbeta"]} if setting["nbeta"] is not None else {}
    sizes = {name: setting[name] for name in ("num_draws", "num_chains", "num_burnin_steps")}
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # about seeds, and fewer burn-in steps than draws
        torch.manual_seed(seed)  # of the batches of its initial loss
        try:
            found = sampler.estimate_learning_coeff_with_summary(
                model,
                loader,
                callbacks=list(callbacks),
                evaluate=evaluate_ce,
                sampling_method=optimizer.SGLD,
                optimizer_kwargs=kwargs,
                **sizes,
                num_steps_bw_draws=1,
                init_loss=setting["initial_loss"],
                seed=seed,
                device="cpu",
                verbose=False,
                online=False,
            )
        except RuntimeError as error:
            if "NaN detected in loss" not in str(error):
                raise
            raise DivergedError(str(error)) from error
        finally:
            model.eval()  # it leaves the model in train mode
    return found, kwargs["nbeta"]  # which it has chosen itself where it was not given


@dataclass(frozen=True)
class DevinterpChains:
    """What one call of devinterp's estimator gave.

    Attributes:
        per_chain: its estimates, (C,).
        initial_loss: L(w0) as it took it.
        own_minus_all: mean over draws of [L_B(w) - L_B(w0)] - [L(w) - L(w0)], B the draw's own batch, (C,); nats;
            NaN where it was not noted.
        positions: steps of the epoch before a draw's, for the draws of `own_minus_all`, or for all.
        last: the chains' last weights.
    """

    per_chain: Tensor
    initial_loss: float
    own_minus_all: Tensor
    positions: list[int]
    last: list[nn.Module]


def devinterp_chains(model: nn.Module, data: Pair, setting: Mapping[str, Any], *, seed: int) -> DevinterpChains:
    """Run `devinterp_traces` and note losses; `setting.all_every` draws lie between those over all the data.

    Cost: beside its own, one forward pass of the data for each `all_every` draws (None: none), and one of each
    draw's batch.
    """
    notes = _Notes(model, data, setting)
    found, nbeta = devinterp_traces(model, data, setting, seed=seed, callbacks=[notes])
    per_chain = torch.tensor([found[f"llc-chain/{chain}"] for chain in range(setting["num_chains"])])
    trace = torch.as_tensor(found["loss/trace"]).double()
    initial = float((trace.mean(1) - per_chain.double() / nbeta).mean())
    own_minus_all, positions = notes.own_minus_all()
    return DevinterpChains(per_chain.double(), initial, own_minus_all, positions, notes.last)


class _Notes:
    """A callback of devinterp: it is called after the step, with the loss of the weights before it."""

    def __init__(self, model: nn.Module, data: Pair, setting: Mapping[str, Any]) -> None:
        self._start, self._data = deepcopy(model).eval(), data
        self._num_batches = -(-len(data[1]) // setting["batch_size"])
        self._first, self._every = setting["num_burnin_steps"], setting["all_every"]
        self._start_loss = float(cross_entropy(self._start(data[0]), data[1]).detach())
        shape = (setting["num_chains"], setting["num_draws"])
        self._own, self._all = torch.full(shape, torch.nan).double(), torch.full(shape, torch.nan).double()
        self.last: list[nn.Module] = []

    def __call__(self, *, chain: int, draw: int, loss: Tensor, data: Pair, model: nn.Module, **_: Any) -> None:
        inputs, targets = data
        self._own[chain, draw] = float(loss) - float(cross_entropy(self._start(inputs), targets))
        last_draw = self._own.shape[1] - 1
        # The weights are those that the next draw's loss belongs to.
        if self._every and draw < last_draw and draw % self._every == 0:
            loss_of_all = float(cross_entropy(model(self._data[0]), self._data[1]))
            self._all[chain, draw + 1] = loss_of_all - self._start_loss
        if draw == last_draw:
            self.last.append(deepcopy(model).eval())

    def own_minus_all(self) -> tuple[Tensor, list[int]]:
        draws = [draw for draw in range(self._own.shape[1]) if not (self._every and self._all[0, draw].isnan())]
        positions = [(self._first + draw) % self._num_batches for draw in draws]
        return (self._own - self._all)[:, draws].mean(1), positions
