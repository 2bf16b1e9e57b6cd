"""Whom bench-llc compares: each takes the same setting and gives the estimate of every chain."""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from curvlab.problem import stack
from curvlab.sampling import effective_sample_size, estimate_llc, split_rhat
from curvlab.sampling.diagnostics import problems_of, standard_error


@dataclass(frozen=True)
class Setting:
    """What all methods are given; names as in `estimate_llc`."""

    model: nn.Module
    data: Any
    num_chains: int
    num_draws: int
    num_burnin_steps: int
    batch_size: int
    step_size: float
    localization: float
    nbeta: float
    initial_loss: float

    @property
    def num_steps(self) -> int:
        """Steps of each chain."""
        return self.num_burnin_steps + self.num_draws

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return the data as two tensors."""
        return stack(self.data, torch.arange(len(self.data)))


def _curvlab(setting: Setting, generator: torch.Generator, *, chunk_size: int | None = None) -> Tensor:
    llc = estimate_llc(
        setting.model,
        nn.CrossEntropyLoss(),
        setting.data,
        num_chains=setting.num_chains,
        num_draws=setting.num_draws,
        num_burnin_steps=setting.num_burnin_steps,
        step_size=setting.step_size,
        batch_size=setting.batch_size,
        nbeta=setting.nbeta,
        localization=setting.localization,
        chunk_size=chunk_size,
        generator=generator,
    )
    return llc.nbeta * (llc.losses - llc.initial_loss)


def _curvlab_vmap(setting: Setting, generator: torch.Generator) -> Tensor:
    return _curvlab(setting, generator, chunk_size=setting.num_chains)


def _devinterp(setting: Setting, generator: torch.Generator, *, replacement: bool = False) -> Tensor:
    # By name, as the type checker must pass without it.
    sampler, optimizer = (importlib.import_module(f"devinterp.{name}") for name in ("slt.sampler", "optim.sgld"))
    evaluate_ce = importlib.import_module("devinterp.utils").evaluate_ce
    dataset = TensorDataset(*setting.tensors())
    loader = DataLoader(dataset, setting.batch_size, sampler=RandomSampler(dataset, replacement=replacement))
    seed = int(torch.randint(2**31, (), generator=generator))
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # about seeds, and fewer burn-in steps than draws
        found = sampler.estimate_learning_coeff_with_summary(
            setting.model,
            loader,
            evaluate=evaluate_ce,
            sampling_method=optimizer.SGLD,
            optimizer_kwargs={
                "lr": setting.step_size,
                "nbeta": setting.nbeta,
                "localization": setting.localization,
            },
            num_draws=setting.num_draws,
            num_chains=setting.num_chains,
            num_burnin_steps=setting.num_burnin_steps,
            num_steps_bw_draws=1,
            init_loss=setting.initial_loss,
            seed=seed,
            device="cpu",
            verbose=False,
            online=False,
        )
    setting.model.eval()  # it leaves the model in train mode
    return setting.nbeta * (torch.as_tensor(found["loss/trace"]) - setting.initial_loss)


def _devinterp_with_replacement(setting: Setting, generator: torch.Generator) -> Tensor:
    return _devinterp(setting, generator, replacement=True)


# The first is what a user gets, the second the same with parallel kernels in place of a thread for each core.
METHODS: dict[str, Callable[[Setting, torch.Generator], Tensor]] = {
    "curvlab": _curvlab,
    "curvlab, one vmap": _curvlab_vmap,
    "devinterp": _devinterp,
    "devinterp, with replacement": _devinterp_with_replacement,
}


def available(name: str) -> bool:
    """Return whether a method is installed; devinterp 2 is none: its loss takes language models' tokens alone."""
    if not name.startswith("devinterp"):
        return True
    try:
        return int(metadata.version("devinterp").split(".")[0]) < 2
    except metadata.PackageNotFoundError:
        return False


def measure(name: str, setting: Setting, generator: torch.Generator) -> dict[str, Any]:
    """Return estimates by chain, R-hat, what `LLC.problems` would say of the draws, seconds by clock and cores.

    A short run comes first: what PyTorch loads when it is first asked for something belongs to no method.
    """
    METHODS[name](replace(setting, num_draws=4, num_burnin_steps=0), torch.Generator().manual_seed(0))
    start, cpu_start = time.perf_counter(), time.process_time()
    draws = METHODS[name](setting, generator)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    rhat, (ess, ess_tail) = split_rhat(draws), (effective_sample_size(draws, kind) for kind in ("bulk", "tail"))
    problems = problems_of(
        draws, draws[:, :0], rhat=rhat, ess=ess, ess_tail=ess_tail, stderr=standard_error(draws)
    )
    return {
        "per_chain": draws.double().mean(1).tolist(),
        "rhat": rhat,
        "problem": "; ".join(text.split(":")[0] for text in problems),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
    }


def floor_seconds(setting: Setting, *, num_steps: int) -> dict[str, float]:
    """Return seconds, on the clock and of all cores, of the matrix products and the normals alone.

    Scaled up from `num_steps` steps. Products of one step and layer (B, I) x (I, O): outputs, weight gradient, and
    input gradient but for the first.
    """
    layers = [m.weight for m in setting.model.modules() if isinstance(m, nn.Linear)]
    sizes = [int(layers[0].shape[1]), *(int(weight.shape[0]) for weight in layers)]
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(setting.batch_size, size, generator=generator) for size in sizes]
    weights = [torch.randn(a, b, generator=generator) for a, b in pairwise(sizes)]
    noise = torch.empty(sum(parameter.numel() for parameter in setting.model.parameters()))

    def products() -> None:
        for index, weight in enumerate(weights):
            values[index] @ weight
            values[index].T @ values[index + 1]
            if index > 0:
                values[index + 1] @ weight.T

    def normals() -> None:
        noise.normal_(0.0, 1.0, generator=generator)

    scale = setting.num_steps / num_steps
    found = {}
    for name, work in {"products": products, "normals": normals}.items():
        work()
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(num_steps * setting.num_chains):
            work()
        found[name] = scale * (time.perf_counter() - start)
        found[f"{name}_cpu"] = scale * (time.process_time() - cpu_start)
    return found
