"""The command line of a target: python -m experiments.<paper>.<item> [KEY=VALUE ...]."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from omegaconf import DictConfig

from curvlab.lab import runs
from curvlab.lab.runs import over_ranks
from curvlab.lab.target.declaration import Target
from curvlab.lab.target.discovery import ROOT
from curvlab.lab.target.help import print_target_help
from curvlab.lab.target.pipe import until_reader_leaves
from curvlab.lab.target.short_forms import expand

PLAN = "plan=true"


def main(target: Target) -> None:
    """Compute, judge and draw `target` as the command line says, in one thread unless OMP_NUM_THREADS is set."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        with until_reader_leaves():
            print_target_help(target)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads were no faster alone, and much slower in company
    if PLAN in sys.argv[1:]:  # no key of the config: nothing that is computed depends on it
        sys.argv.remove(PLAN)
        runs.main(_entry(target), lambda cfg: _print_plan(target, cfg))
        return
    runs.main(_entry(target), lambda cfg: _run(target, cfg))


def _print_plan(target: Target, cfg: DictConfig) -> None:
    from curvlab.lab.target.plan import describe, plan_of
    from curvlab.lab.target.plan.stored import stored_units

    print(describe(plan_of(target, cfg)), flush=True)
    for line in stored_units(target, cfg):
        print(line, flush=True)


def load_config(target: Target, overrides: Sequence[str] = ()) -> DictConfig:
    """Return the config that the command line of `target` would give, for tests and notebooks."""
    return runs.load_config(_entry(target), overrides)


def _entry(target: Target) -> runs.Entry:
    return runs.Entry(
        config_name=target.config_name,
        folder=ROOT / "conf",
        make_target=target.make_name,
        module=target.module,
        expand=expand,
    )


def _run(target: Target, cfg: DictConfig) -> None:
    cfg = over_ranks.quiet(cfg)
    if cfg.progress:  # before the seconds that torch takes to load
        print(f"{target.make_name}: {target.title} ({cfg.preset})", file=sys.stderr, flush=True)
    from curvlab.lab.target.execution import run_target

    with over_ranks.together():
        run_target(target, cfg)
