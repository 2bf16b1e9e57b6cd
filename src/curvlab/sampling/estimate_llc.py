"""Estimate the local learning coefficient of a model at its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from curvlab.checkpoint import fingerprint
from curvlab.problem import Data, Loss
from curvlab.sampling.chains import ChainTraces, run_chains
from curvlab.sampling.checkpoint import ChainCheckpoints
from curvlab.sampling.learning_coefficient import LLC
from curvlab.sampling.rmsprop import RMSProp
from curvlab.sampling.sgld import SGLD
from curvlab.training import EnsembleLosses


def estimate_llc(
    model: nn.Module,
    loss: Loss,
    data: Data,
    *,
    num_chains: int,
    num_draws: int,
    num_burnin_steps: int,
    step_size: float,
    batch_size: int,
    nbeta: float | None = None,
    localization: float = 1.0,
    steps_per_draw: int = 1,
    preconditioner: RMSProp | None = None,
    weights: Tensor | None = None,
    chunk_size: int | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    on_step: Callable[[int], None] | None = None,
    run: Callable[..., ChainTraces] = run_chains,
    generator: torch.Generator,
) -> LLC:
    """Estimate λ(w0) = nbeta (E[L(w)] - L(w0)) at the model's parameters w0 with SGLD (Lau et al. 2023).

    E is over exp(-nbeta L(w) - localization/2 |w - w0|²), sampled by independent chains (see `SGLD`). L(w0) is
    over all the data, and each draw is compared with L_B(w0) on its own batch: unbiased, without most of the
    batch's noise. The model is copied into eval mode and never changed. Look at `problems` before using `value`.

    Args:
        model: any module. Parameters that require gradients move, all others stay.
        loss: mean over examples: nn.CrossEntropyLoss(), ..., or a function of (outputs, targets).
        data: the training data: a pair of tensors (fastest, on the model's device), a dataset, or batches.
            Of a DataLoader the examples drawn at each step go through its collator, which may pad them.
        num_chains: C, each from w0 with its own batches and noise. The interval is over chains: 4 or more.
        num_draws: of each chain, after burn-in.
        num_burnin_steps: steps before, in no estimate.
        step_size: ε; `choose_sgld_settings` finds one. Too large a step shows in `problems` only where chains
            diverge; short of that it raises the estimate without a sign: halve it, and compare.
        batch_size: of a chain's step, drawn with replacement; from n on, all the data at each step.
        nbeta: inverse temperature times n; None: n / ln n, n the number of examples of `data`.
        localization: γ; the default 1 is weak. `choose_sgld_settings` finds one that the burn-in can follow.
        steps_per_draw: a draw is the mean of so many steps' losses.
        preconditioner: of the steps, learned in half the burn-in; None: plain SGLD. `RMSProp` moves parameters of
            small gradients further. Its step size has another scale: SGLD's times its damping is a start.
        weights: w of the examples, (N,), not negative, where L is the weighted mean 1/N Σ_i w_i l_i, as that of
            `DataOperator.weighted`; in the order of the data. Chains draw examples uniformly all the same.
        chunk_size: chains computed at once, None: chosen (see `run_chains`). The result is the same for any, to
            rounding.
        checkpoint: folder where chains are kept, saved every minute; the same call resumes there and ends at the
            same numbers. With more `num_draws` it goes on from the last save of the shorter one.
        checkpoint_every: save after so many steps, too.
        on_step: progress, see `run_chains`.
        run: what takes the chains to their end: `run_chains`, or curvlab.parallel's, which spreads them.
        generator: seeds the chains' generators; its state alone decides the result.

    Cost: C (num_burnin_steps + num_draws steps_per_draw) forward and backward passes of a batch, as many times P
    normals; memory of 3 C P numbers and of a chunk's activations.
    """
    if num_chains < 1 or num_draws < 1 or num_burnin_steps < 0 or steps_per_draw < 1:
        raise ValueError(
            "need num_chains, num_draws, steps_per_draw of at least 1 and num_burnin_steps of at least 0, got "
            f"{num_chains}, {num_draws}, {steps_per_draw} and {num_burnin_steps}"
        )
    if not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator, got {generator!r}: torch.Generator().manual_seed(0)"
        )
    losses = EnsembleLosses(model, loss, data, example_weights=weights)
    nbeta = default_nbeta(losses.num_examples) if nbeta is None else nbeta
    check_nbeta(nbeta)
    sampler = SGLD(
        losses,
        step_size=step_size,
        nbeta=nbeta,
        localization=localization,
        batch_size=batch_size,
        preconditioner=preconditioner,
        num_burnin_steps=num_burnin_steps,
    )
    seeds = torch.randint(2**62, (num_chains,), generator=generator, device=generator.device).tolist()
    checkpoints = None
    if checkpoint is not None:
        settings = {
            "step_size": step_size,
            "nbeta": nbeta,
            "localization": localization,
            "batch_size": batch_size,
            "first_seed": seeds[0],
            "parameters": fingerprint([losses.start]),
            "losses of the data": fingerprint([losses.start_losses]),
            "data": cache(lambda: fingerprint(losses.fixed_tensors())),
        }
        if losses.example_weights is not None:
            settings |= {"weights": fingerprint([losses.example_weights])}
        if preconditioner is not None:
            settings |= {"preconditioner": asdict(preconditioner), "num_burnin_steps": num_burnin_steps}
        checkpoints = ChainCheckpoints(checkpoint, settings, num_chains=num_chains, every=checkpoint_every)
    num_steps = num_burnin_steps + num_draws * steps_per_draw
    traces = run(sampler, seeds, num_steps, chunk_size=chunk_size, checkpoints=checkpoints, on_step=on_step)
    excess = (traces.losses - traces.start_losses).double()
    return LLC.of_traces(
        excess[:, num_burnin_steps:].view(num_chains, num_draws, steps_per_draw).mean(2),
        excess[:, :num_burnin_steps],
        initial_loss=float(losses.start_losses.double().mean()),
        nbeta=nbeta,
        step_size=step_size,
        localization=localization,
        num_examples=losses.num_examples,
        num_gradients=num_chains * num_steps * min(batch_size, losses.num_examples),
    )


def check_nbeta(nbeta: float) -> None:
    """Refuse an inverse temperature at which the chains would not see the loss."""
    if not 0 < nbeta < math.inf:
        raise ValueError(f"nbeta must be positive and finite, got {nbeta}; None is n / ln n.")


def default_nbeta(num_examples: int) -> float:
    """Return n / ln n, the temperature of WBIC (Watanabe 2013); n is the size of the data, not of a batch."""
    if num_examples < 3:
        raise ValueError(f"n / ln n needs at least 3 examples, got {num_examples}: pass nbeta.")
    return num_examples / math.log(num_examples)
