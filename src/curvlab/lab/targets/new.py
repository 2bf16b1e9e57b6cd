"""`python -m experiments new PAPER/ITEM`: lays out a target that runs, to be changed into what it is to show."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from curvlab.lab.targets.target import ROOT

_FILES = {
    "experiments/{key}.py": '''"""What this shows, in a line (AUTHOR & AUTHOR YEAR, FIGURE).

make {name} PRESET=smoke|embedded|laptop|paper ARGS="num_draws=100"

What the paper says, what is computed, and where ours differs from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from omegaconf import DictConfig

from curvlab.lab import Computed, Run, Target, panels, plots, unit

TARGET = Target(__name__, title="what it shows, in a line", paper={{"num_draws": "not stated"}})


@unit("{key}/draws", version=1, about="draws of seed {{seed}}")
def draws(run: Run, /, *, num_draws: int, seed: int) -> dict[str, Any]:
    """Return the mean of so many normals: a unit of work is stored under its keyword arguments."""
    numbers = torch.randn(num_draws, generator=run.generator("{key}", seed))
    return {{"mean": numbers.mean().item()}}


def compute(run: Run, cfg: DictConfig) -> Mapping[str, pd.DataFrame]:
    """Return the tables: a mean for each seed."""
    rows = [{{"seed": seed, **draws(run, num_draws=cfg.num_draws, seed=seed)}} for seed in cfg.seeds]
    return {{"table": pd.DataFrame(rows)}}


def draw(computed: Computed) -> Mapping[str, Figure]:
    """Draw the mean of each seed."""
    figure, axes = plots.figure()
    panels.lines(axes[0, 0], computed["table"], x="seed", y="mean")
    panels.frame(axes[0, 0], x="seed", y="mean of the draws")
    return {{"figure.png": figure}}
''',
    "experiments/{key}.yaml": """source: AUTHOR & AUTHOR YEAR, FIGURE
claims:
  centred:                    # `value` is explained in curvlab.lab.claims.claim_sheet
    statement: The mean of the draws is 0.
    paper_value: null
    measure: mean over seeds
    criterion: {{at_least: -0.5, at_most: 0.5}}
    value: {{mean: mean, over: seed}}
    why: The generator is biased.
""",
    "conf/{key}.yaml": """# @package _global_
# make {name}    what it shows, in a line (AUTHOR & AUTHOR YEAR, FIGURE)
defaults:
  - /base
  - _self_
  - optional /{key}@_global_: ${{preset}}

num_draws: 1000     # what it is, in words
seeds: [0, 1, 2]
""",
    "conf/{key}/smoke.yaml": "num_draws: 10\n",
}


def lay_out(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Write the files of a new target and print their paths; return the exit status.

    Args:
        arguments: its key alone, e.g. ["lissa/fig8"].
        root: of the repository.
    """
    if len(arguments) != 1 or not re.fullmatch(r"[a-z][a-z0-9_]*/[a-z][a-z0-9_]*", arguments[0]):
        print("usage: python -m experiments new PAPER/ITEM, e.g. lissa/fig8", file=sys.stderr)
        return 2
    key = arguments[0]
    name = key.replace("benchmarks/", "bench/").replace("/", "-").replace("_", "-")
    if there := [path for path in ("experiments/" + key, f"experiments/{key}.py") if (root / path).exists()]:
        print(f"error: {there[0]} is there already; choose another name", file=sys.stderr)
        return 1
    for pattern, text in _FILES.items():
        path = root / pattern.format(key=key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(key=key, name=name), encoding="utf-8")
        print(path.relative_to(root).as_posix())
    print(f"make {name} PRESET=smoke runs it; `make help` lists it")
    return 0
