"""Sample around the weights of a checkpoint: LLC and WBIC, what they lack, and whether to believe them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf
from torch import nn

from curvlab.lab import Run, unit
from curvlab.sampling import LLC, choose_sgld_settings, descent_to_minimum, estimate_llc

if TYPE_CHECKING:
    from experiments.ngd.trajectories import Network

LOWEST = "the lowest point: of the loss, in the region that the LLC's chains sample"
NO_STEP_SIZE = "no step size keeps both limits"
NO_BOTTOM = "the search for the lowest point of the sampled region has not ended"
RAW = {"llc": "from the lowest sampled point", "llc_raw": "from the weights"}
TOO_FAR = "the weights lie further above the lowest point of the sampled region than the LLC is large"


def sampled(
    network: Network, model: nn.Module, llc: DictConfig, *, key: dict[str, Any], seed: int
) -> dict[str, Any]:
    """Return LLC and WBIC at the model's weights, and what the chains say of them.

    `llc` is measured from the lowest point of the region that the chains sample, also where `valid` is false: then
    `problem` says why it is no learning coefficient, a descent larger than `llc` among the reasons. `llc_raw` is
    measured from the weights, as in the paper, and lacks `descent`; `raw_problem` lists what is wrong with it, a
    descent above a tenth of `llc` among it. `curvature_cutoff` is γ/(nβ), below which a direction counts little:
    both depend on it. `step_size` is what the chains took.

    Args:
        network: data, loss and random streams.
        model: at the weights.
        llc: arguments of `estimate_llc`. Its localization is one for all states, or they could not be compared;
            step_size null: `choose_sgld_settings` finds the state's own.
        key: identifies the weights in the store, and says for the terminal which they are.
        seed: the chains draw the same numbers at every checkpoint and optimizer of a seed.
    """
    run, found = network.run, True
    arguments: dict[str, Any] = OmegaConf.to_container(llc, resolve=True)  # type: ignore[assignment]
    if arguments["step_size"] is None:
        pilot = {name: arguments.get(name) for name in ("batch_size", "num_burnin_steps", "nbeta", "localization")}
        chosen = _step_size(run, network, model, seed, **key, pilot=pilot)
        arguments["step_size"], found = chosen["step_size"], chosen["converged"]
    traces = _chains(run, network, model, seed, **key, llc=arguments)
    place = {"localization": arguments["localization"], "nbeta": arguments.get("nbeta")}
    found_by_search = _descent(run, network, model, **key, settings=place)
    descent = found_by_search["descent"]
    raw = LLC.of_traces(**traces, descent=descent)
    own = raw.from_lowest_point(descent)
    problems = [NO_STEP_SIZE] * (not found) + _names(own)
    problems += [NO_BOTTOM] * (not found_by_search["converged"]) + [TOO_FAR] * (descent > own.value)
    return {
        "llc": own.value,
        "llc_stderr": own.stderr,
        "llc_raw": raw.value,
        "descent": descent,
        "curvature_cutoff": own.curvature_cutoff,
        "step_size": own.step_size,
        "rhat": own.rhat,
        "ess": own.ess,
        "ess_tail": own.ess_tail,
        "strictly_mixed": own.strictly_mixed,
        "valid": not problems,
        "problem": "; ".join(problems),
        "raw_problem": "; ".join(_names(raw)),
        "wbic": own.wbic,
        "wbic_stderr": own.wbic_stderr,
    }


def measured_both_ways(task: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield `llc` and `llc_raw` with the words of a claim about them: {of}, {task}, {measured}, {how}."""
    for column, measured in RAW.items():
        of, how = (task, "") if column == "llc" else (f"raw-{task}", ", as the paper measures it")
        yield column, {"of": of, "task": task, "measured": measured, "how": how}


def whose(exact: bool) -> dict[str, str]:
    """Return the word {whose} that opens the source of a claim: claims on exact NGD are ours.

    The paper's NGD is an implementation with Kaldi's smoothing, an approximation: the full Fisher matrix of its
    256-256 network has 7e10 entries.
    """
    return {"whose": "ours, of exact NGD, after " if exact else ""}


def curvature_cutoff(rows: pd.DataFrame) -> float:
    """Return γ/(nβ) of estimates with equal settings; nan where nothing was sampled."""
    return float(rows.curvature_cutoff.max()) if "curvature_cutoff" in rows else math.nan


@unit("ngd/step_size", version=2, about="step size for {seed_name} by {optimizer[name]}, seed {repeat}")
def _step_size(
    run: Run, network: Network, model: nn.Module, seed: int, /, *, pilot: dict[str, Any], **_: Any
) -> dict[str, Any]:
    generator = network.generator("pilot", seed)
    found = choose_sgld_settings(model, network.loss, network.train, **pilot, sampler="sgld", generator=generator)
    return {"step_size": found.step_size, "converged": found.converged, "report": list(found.report)}


@unit(
    "ngd/llc",
    version=3,
    about="LLC of {seed_name} by {optimizer[name]} (lr {optimizer[lr]:g}), seed {repeat}, epoch {epoch}",
    resumes=True,
)
def _chains(
    run: Run, network: Network, model: nn.Module, seed: int, /, *, llc: dict[str, Any], checkpoint: Path, **_: Any
) -> dict[str, Any]:
    """Return the traces (`LLC.traces`)."""
    generator, folder = network.generator("chains", seed), checkpoint / "chains"
    found = estimate_llc(model, network.loss, network.train, **llc, checkpoint=folder, generator=generator)
    return found.traces()


@unit("ngd/descent", version=4, about="descent left to {seed_name} by {optimizer[name]}, seed {repeat}")
def _descent(
    run: Run, network: Network, model: nn.Module, /, *, settings: dict[str, Any], **_: Any
) -> dict[str, Any]:
    """Return what the estimate lacks because the weights lie above the lowest point that the chains sample."""
    found = descent_to_minimum(model, network.loss, network.train, **settings)
    return {"descent": found.value, "converged": found.converged}


def _names(llc: LLC) -> list[str]:
    return [text.split(":")[0] for text in llc.problems]
