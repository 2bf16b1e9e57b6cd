"""Time and memory of models, in a process of its own.

python -m experiments.benchmarks.models.worker    reads a task from each line, writes what it measured to a line
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.problem.model_function import plain_attention
from experiments.benchmarks.curvature.gauges import measure_peak, measure_times
from experiments.benchmarks.models.cases import Case, build_case
from experiments.benchmarks.timing import kernel_threads

# glibc's mallopt: from which size on a freed block goes back to the system, and how much may be left at the end.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
AT_ONCE, AS_A_RULE = (2**16, 2**16), (2**25, 2**30)  # what glibc itself adapts to where blocks are large

GRADIENT, PLAIN_GRADIENT = "gradient step", "gradient step, plain attention"
PRODUCT, LOW_MEMORY, DIFFERENCES = "product", "low memory product", "product, finite differences"
ONCE = (PLAIN_GRADIENT, DIFFERENCES)  # measured once: no claim rests on them


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Return bytes held, MiB by which memory rises and seconds, by method, one number for each repeat or round."""
    device = torch.device(task["device"])
    generator = torch.Generator().manual_seed(task["seed"])
    case = build_case(task["settings"], generator, device)
    arguments = (case.model, nn.CrossEntropyLoss(), (case.inputs, case.targets))
    op = GaussNewtonOperator(*arguments, batch_size=len(case.targets))
    differences = GaussNewtonOperator(*arguments, batch_size=len(case.targets), jvp="finite_difference")
    low_memory = GaussNewtonOperator(*arguments, batch_size=len(case.targets), low_memory=True)
    vector = torch.randn(case.num_parameters, generator=generator).to(device)
    methods: dict[str, Callable[[], Any]] = {
        GRADIENT: lambda: _gradient_step(case),
        PLAIN_GRADIENT: lambda: _plain_gradient_step(case),
        PRODUCT: lambda: op.matvec(vector),
        LOW_MEMORY: lambda: low_memory.matvec(vector),
        DIFFERENCES: lambda: differences.matvec(vector),
    }
    start = time.process_time()
    with kernel_threads(task["num_threads"]):
        give_back_freed_memory(AS_A_RULE)
        timed = {"forward": lambda: _forward(case)}
        timed |= {name: methods[name] for name in (GRADIENT, PRODUCT, LOW_MEMORY)}
        for compute in timed.values():
            compute()
        seconds = measure_times(timed, num_rounds=task["num_rounds"], device=device)
        for name in ONCE:
            methods[name]()
        give_back_freed_memory(AT_ONCE)
        rises: dict[str, list[float]] = {name: [] for name in methods}
        for _ in range(task["num_repeats"]):
            for name, compute in methods.items():
                if name not in ONCE or not rises[name]:
                    rises[name].append(measure_peak(compute, device))
        give_back_freed_memory(AS_A_RULE)
    return {
        "num_parameters": case.num_parameters,
        "held": case.held,
        "vector": vector.numel() * vector.element_size(),
        "seconds": seconds,
        "rises": rises,
        "cpu_seconds": time.process_time() - start,
    }


def give_back_freed_memory(thresholds: tuple[int, int]) -> None:
    """Tell malloc from which sizes on freed memory goes back to the system, where it is glibc's."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, thresholds[0])
        libc.mallopt(M_TRIM_THRESHOLD, thresholds[1])


def _forward(case: Case) -> None:
    with torch.no_grad():
        case.loss()


def _gradient_step(case: Case) -> None:
    """Forward, backward and a step of SGD that goes nowhere, so that all repeats are the same."""
    case.loss().backward()
    stepper = torch.optim.SGD(case.parameters, lr=0.0)
    stepper.step()
    stepper.zero_grad()


def _plain_gradient_step(case: Case) -> None:
    with plain_attention():
        _gradient_step(case)


def main() -> None:
    """Answer each line of stdin by one line of stdout."""
    for line in sys.stdin:
        try:
            answer = measure(json.loads(line))
        except Exception as error:  # whatever it is, the other process has to know
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
