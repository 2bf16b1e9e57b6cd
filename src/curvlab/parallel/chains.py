"""SGLD chains spread over processes, and the local learning coefficient from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from curvlab.problem import Data, Loss
from curvlab.ranks import Ranks
from curvlab.sampling import LLC
from curvlab.sampling import estimate_llc as estimate_on_one_process
from curvlab.sampling.chains import ChainsState, ChainTraces, run_chains
from curvlab.sampling.sgld import SGLD


def estimate_llc(
    model: nn.Module,
    loss: Loss,
    data: Data,
    *,
    generator: torch.Generator,
    ranks: Ranks | None = None,
    **settings: Any,
) -> LLC:
    """Return `curvlab.sampling.estimate_llc(...)`, the same on every rank, with its chains spread over the ranks.

    Rank r of R runs the chains r, r + R, ...; each is seeded by its own number, so the estimate is the same for
    any number of ranks, to rounding. Chains draw from all the data and move all parameters: every rank holds both.
    With `checkpoint` each chain has a file of its own in that folder, which all ranks must see; a killed run goes
    on with as many ranks as one likes.

    Args:
        model: the same on every rank.
        loss: see `curvlab.sampling.estimate_llc`.
        data: all of it.
        generator: seeded alike on every rank.
        ranks: the process group's by default.
        settings: of `curvlab.sampling.estimate_llc`.

    Cost: its, divided by the ranks; a gather of the chains' ends, C P numbers.
    """
    ranks = Ranks.current() if ranks is None else ranks

    def run(sampler: SGLD, seeds: Sequence[int], num_steps: int, **rest: Any) -> ChainTraces:
        return run_chains_over_ranks(ranks, sampler, seeds, num_steps, **rest)

    return estimate_on_one_process(model, loss, data, run=run, generator=generator, **settings)


def run_chains_over_ranks(
    ranks: Ranks,
    sampler: SGLD,
    seeds: Sequence[int],
    num_steps: int,
    *,
    callback: Callable[[ChainsState], object] | None = None,
    **settings: Any,
) -> ChainTraces:
    """Run this rank's chains and return those of all ranks, in the order of `seeds`; see `run_chains`.

    `callback` is called for this rank's chains alone.
    """
    ranks.agree(
        torch.tensor([seed % 2**31 for seed in seeds]),
        "the seeds of the chains: pass generators with the same seed on every rank",
    )
    mine = range(ranks.rank, len(seeds), ranks.size)
    own = [seeds[chain] for chain in mine]
    traces = run_chains(sampler, own, num_steps, callback=callback, **settings) if mine else None
    found = ranks.gather((list(mine), None if traces is None else [part.cpu() for part in traces.parts()]))
    start = sampler.losses.start
    order = torch.tensor([chain for chains, _ in found for chain in chains]).argsort()
    parts = zip(*(parts for _, parts in found if parts is not None), strict=True)
    return ChainTraces(*(torch.cat(part)[order].to(start) for part in parts))
