"""A worker process under a limit of time and of memory, and what it is handed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from curvlab.lab.models import ConvNet

# Imported, although it is only run as a file: what it measures is then known to depend on its code (`make stale`).
from experiments.benchmarks.attribution.libraries import worker

WORKER = Path(str(worker.__file__))
Pair = tuple[Tensor, Tensor]
OWN_LIBRARIES = ("curvlab", "gradients", "curvlinops")  # run with this Python; the others with peers_python


def measure(
    network: Mapping[str, Any], options: Mapping[str, Any], *, peers_python: str | None, **limits: float
) -> dict[str, Any]:
    """Return {"status": "done", "scores", "cpu_seconds", "peak_bytes", ...}, or a status that says why not.

    Args:
        network: what `worker.TrainedNetwork` reads.
        options: library, method and the library's own options.
        peers_python: a Python that has the libraries which cannot live beside our dependencies, or None.
        limits: `time_limit`, seconds of processor time of the worker; `memory_limit`, GiB of its resident memory.
    """
    own = options["library"] in OWN_LIBRARIES
    python = sys.executable if own else peers_python
    if python is None:
        return {"status": "not installed"}
    if not own and not Path(python).exists():
        raise FileNotFoundError(
            f"peers_python={python} does not exist: build it with `python -m venv DIR && DIR/bin/pip install "
            "'.[peers]'`, and pass peers_python=DIR/bin/python, or peers_python=null to leave the peers out."
        )
    with tempfile.TemporaryDirectory() as folder:
        source, target, log = (Path(folder) / name for name in ("network.pt", "result.pt", "log"))
        torch.save(dict(network), source)
        command = [python, "-W", "ignore", str(WORKER), str(source), str(target), json.dumps(dict(options))]
        environment = os.environ | {"OMP_NUM_THREADS": str(options.get("num_threads", 1))}
        if own:
            environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
            broken = _watch(process, **limits)
        if broken is not None:
            return {"status": broken}
        if process.returncode != 0 or not target.exists():
            return {"status": _reason(log.read_text())}
        return {"status": "done", **torch.load(target, weights_only=True)}


def _watch(process: subprocess.Popen, time_limit: float, memory_limit: float) -> str | None:
    """Wait for the process; end it and return the reason where it passes a limit."""
    start = time.monotonic()
    while process.poll() is None:
        seconds, memory = _usage(process.pid, since=start)
        if seconds > time_limit or memory > memory_limit * 2**30:
            process.kill()
            process.wait()
            over = f"time limit of {time_limit:g} s" if seconds > time_limit else ""
            return f"over the {over or f'memory limit of {memory_limit:g} GiB'}"
        time.sleep(0.1)
    return None


def _usage(pid: int, *, since: float) -> tuple[float, int]:
    """Return seconds of processor time and resident bytes; elapsed time and 0 where /proc does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return time.monotonic() - since, 0


def _reason(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = lines[-1] if lines else "no message"
    if "PackageNotFoundError" in last or last.startswith("ModuleNotFoundError"):
        return "not installed"
    return f"failed: {last[:160]}"


def limits_of(settings: DictConfig) -> tuple[str | None, dict[str, float]]:
    """Return the peers' Python, which belongs to a machine, not to a result, and the limits of `measure`."""
    limits = {"time_limit": settings.time_limit, "memory_limit": settings.memory_limit}
    return settings.peers_python or os.environ.get("CURVLAB_PEERS_PYTHON") or None, limits


def stored_network(model: nn.Module, settings: DictConfig, train: Pair, test: Pair) -> dict[str, Any]:
    """Return a network and its data as `worker.TrainedNetwork` reads them, but for the damping.

    Args:
        model: an MLP, a ConvNet, an OPT or a GPT-2.
        settings: of its task: what `model.activation` it has.
        train: (inputs, targets).
        test: the queries, likewise.
    """
    described = _description(model, str(settings.model.get("activation", "relu")))
    is_mlp = set(described) == {"sizes", "activation"}
    stored: dict[str, Any] = {"parameters": [parameter.detach().cpu() for parameter in model.parameters()]}
    for part, (inputs, targets) in {"train": train, "test": test}.items():
        stored[f"{part}_inputs"] = (inputs.flatten(1) if is_mlp else inputs).cpu().contiguous()
        stored[f"{part}_targets"] = targets.cpu()
    return described | stored


def _description(model: nn.Module, activation: str) -> dict[str, Any]:
    """Return what `libraries.networks.build` builds the network from."""
    config = getattr(model, "config", None)
    if config is not None:
        if config.model_type not in ("opt", "gpt2"):
            raise ValueError(
                f"peers get MLPs, ConvNets, OPTs, GPT-2s, no {config.model_type}: set its peers to null"
            )
        return {config.model_type: config.to_dict()}
    linear, convolutions = (
        [module for module in model.modules() if isinstance(module, kind)] for kind in (nn.Linear, nn.Conv2d)
    )
    described = {
        "sizes": [linear[0].in_features, *(layer.out_features for layer in linear)],
        "activation": activation,
    }
    if convolutions:
        if not isinstance(model, ConvNet):
            raise ValueError(
                f"peers get MLPs, ConvNets and OPTs, no {type(model).__name__}: set its peers to null"
            )
        described["channels"] = [convolutions[0].in_channels, *(layer.out_channels for layer in convolutions)]
    return described
