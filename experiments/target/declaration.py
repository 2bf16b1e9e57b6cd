"""A target: one table or figure of a paper, or one benchmark."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Target:
    """Ties the rooms of a target's folder together; `TARGET` in the folder's __init__.py.

    The functions are named as "module:function" and loaded when they are needed: a module that begins with a dot
    lies in the target's folder. Targets that share a function name the same one.

    Args:
        package: `__name__` of the folder's package, "experiments.<paper>.<item>", from which all names follow.
        title: one line for `make help` and the report.
        paper: the paper's settings by the name of ours: a key of the config ("pbrf.epsilon"; looked up for each
            task where there are tasks; `*` for every entry of a mapping), or a column of a table
            ("summary.csv:num_steps"). The report shows ours, read from there, beside the paper's.
        compute: (run, cfg) -> tables by name; "table" becomes table.csv.
        judge: (computed, claims) -> results of the claims; asked only where the folder has a claims.yaml.
        draw: (computed) -> figures by file name.
        digits: significant digits of a table's numbers, by its name; 6 unless told.
        after: keys of targets whose units of work this one reuses: side by side, it starts after them.
    """

    package: str
    title: str
    paper: Mapping[str, Any] = field(default_factory=dict)
    compute: str = ".compute:compute"
    judge: str = ".claims:judge"
    draw: str = ".plot:draw"
    digits: Mapping[str, int] = field(default_factory=dict)
    after: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The name everywhere: "lissa/fig1"."""
        return "/".join(self.package.split(".")[-2:])

    @property
    def paper_key(self) -> str:
        """The paper's key, or "benchmarks"."""
        return self.key.split("/")[0]

    @property
    def make_name(self) -> str:
        """The name in the Makefile: "lissa-fig1", "bench-ngd-step"."""
        return self.key.replace("benchmarks/", "bench/").replace("/", "-").replace("_", "-")

    @property
    def config_name(self) -> str:
        """The primary config below conf/."""
        return f"{self.key}/target"

    @property
    def description(self) -> str:
        """The docstring of the target's package."""
        return (importlib.import_module(self.package).__doc__ or self.title).strip()

    @property
    def claims_file(self) -> Path | None:
        """The statements that it judges; None for a target without claims."""
        path = Path(str(importlib.import_module(self.package).__file__)).with_name("claims.yaml")
        return path if path.is_file() else None

    def load(self, room: str) -> Callable[..., Any]:
        """Return the function `room`: "compute", "judge" or "draw"."""
        module, _, name = getattr(self, room).partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module, self.package), name)
        return function
