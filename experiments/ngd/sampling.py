"""Sample around the weights of a checkpoint: LLC and WBIC, what they lack, and whether to believe them."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf
from torch import nn

from curvlab.lab import Run
from curvlab.sampling import LLC, choose_sgld_settings, descent_to_minimum, estimate_llc
from experiments.ngd.task import Task

NO_STEP_SIZE = "no step size keeps both limits"


def sampled(
    run: Run, task: Task, model: nn.Module, llc: DictConfig, *, key: dict[str, Any], seed: int, about: str
) -> dict[str, Any]:
    """Return LLC and WBIC at the model's weights, and what the chains say of them.

    `llc` is measured from the minimum near the weights, also where `valid` is false: then `problem` says why it is
    no learning coefficient. `llc_raw` is measured from the weights, as in the paper, and lacks `descent`;
    `raw_problem` lists what is wrong with it, a descent above a tenth of `llc` among it. `curvature_cutoff` is
    γ/(nβ), below which a direction counts little: both depend on it. `step_size` is what the chains took.

    Args:
        run: seeds, store.
        task: data, loss and name.
        model: at the weights.
        llc: arguments of `estimate_llc`. Its localization is one for all states, or they could not be compared;
            step_size null: `choose_sgld_settings` finds the state's own.
        key: identifies the weights in the store.
        seed: the chains draw the same numbers at every checkpoint and optimizer of a seed.
        about: names the weights for the reader.
    """
    arguments: dict[str, Any] = OmegaConf.to_container(llc, resolve=True)  # type: ignore[assignment]
    found = True
    if arguments["step_size"] is None:
        pilot = {name: arguments.get(name) for name in ("batch_size", "num_burnin_steps", "nbeta", "localization")}
        compute = partial(_step_size, run, task, model, pilot, seed)
        chosen = run.unit("ngd/step_size", key | pilot, compute, version=1, about=f"step size for {about}")
        arguments["step_size"], found = chosen["step_size"], chosen["converged"]
    traces = run.unit(
        "ngd/llc",
        key | {"llc": arguments},
        partial(_chains, run, task, model, arguments, seed),
        version=2,
        about=f"LLC of {about}",
        resumes=True,
    )
    settings = {"localization": arguments["localization"], "nbeta": arguments.get("nbeta")}
    descent = run.unit(
        "ngd/descent",
        key | settings,
        partial(_descent, task, model, settings),
        version=2,
        about=f"descent left to {about}",
    )["descent"]
    row = _llc(traces, descent)
    if not found:
        row |= {"valid": False, "problem": "; ".join(filter(None, [NO_STEP_SIZE, row["problem"]]))}
    return row


def _step_size(run: Run, task: Task, model: nn.Module, pilot: dict[str, Any], seed: int) -> dict[str, Any]:
    generator = run.generator("pilot", task.name, seed)
    settings = choose_sgld_settings(model, task.loss, task.train, **pilot, sampler="sgld", generator=generator)
    return {"step_size": settings.step_size, "converged": settings.converged, "report": list(settings.report)}


def _chains(  # noqa: PLR0917
    run: Run, task: Task, model: nn.Module, arguments: dict[str, Any], seed: int, unfinished: Path
) -> dict[str, Any]:
    """Return the traces (`LLC.traces`)."""
    generator = run.generator("chains", task.name, seed)
    return estimate_llc(
        model, task.loss, task.train, **arguments, checkpoint=unfinished / "chains", generator=generator
    ).traces()


def _descent(task: Task, model: nn.Module, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what the estimate lacks because the weights lie above the minimum near them."""
    return {"descent": descent_to_minimum(model, task.loss, task.train, **settings)}


def _llc(traces: dict[str, Any], descent: float) -> dict[str, Any]:
    raw = LLC.of_traces(**traces, descent=descent)
    llc = raw.from_minimum(descent)
    return {
        "llc": llc.value,
        "llc_stderr": llc.stderr,
        "llc_raw": raw.value,
        "descent": descent,
        "curvature_cutoff": llc.curvature_cutoff,
        "step_size": llc.step_size,
        "rhat": llc.rhat,
        "ess": llc.ess,
        "ess_tail": llc.ess_tail,
        "strictly_mixed": llc.strictly_mixed,
        "valid": llc.valid,
        "problem": _named(llc),
        "raw_problem": _named(raw),
        "wbic": llc.wbic,
        "wbic_stderr": llc.wbic_stderr,
    }


def curvature_cutoff(rows: pd.DataFrame) -> float:
    """Return γ/(nβ) of estimates with equal settings; nan where nothing was sampled."""
    return float(rows.curvature_cutoff.max()) if "curvature_cutoff" in rows else math.nan


def _named(llc: LLC) -> str:
    return "; ".join(text.split(":")[0] for text in llc.problems)
