"""A target: one table or figure of a paper, or one benchmark."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def repository() -> Path:
    """Return the folder that holds `experiments/` and `conf/`: that of the `experiments` package in use."""
    spec = importlib.util.find_spec("experiments")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("no folder experiments/ on the path; call this from a checkout of the repository.")
    return Path(next(iter(spec.submodule_search_locations))).resolve().parent


ROOT = repository()
_ROOMS = {"compute": ".compute:compute", "judge": ".claims:judge", "draw": ".plot:draw"}


@dataclass(frozen=True)
class Target:
    """Declares a target; `TARGET` in experiments/<paper>/<item>.py, whose docstring tells what it is about.

    That module has `compute(run, cfg)`, which returns tables by name ("table" becomes table.csv);
    `judge(computed, claims)`, which returns results of the claims of experiments/<paper>/<item>.yaml, and is asked
    only where there are claims; and `draw(computed)`, which returns figures by file name. A target too large for a
    file is a folder of the same name with all this in its __init__.py. `make help` reads the declaration without
    importing the module, so its arguments are literals, but for `paper`, which it leaves out.

    Args:
        module: `__name__`, "experiments.<paper>.<item>", from which all names follow.
        title: one line for `make help` and the report.
        paper: the paper's settings by the name of ours: a key of the config ("pbrf.epsilon"; looked up for each
            task where there are tasks; `*` for every entry of a mapping), or a column of a table
            ("summary.csv:num_steps"). The report shows ours, read from there, beside the paper's.
        compute: "module:function" where it is not the module's own `compute`.
        judge: likewise.
        draw: likewise.
        digits: significant digits of a table's numbers, by its name; 6 unless told.
        after: keys of targets whose units of work this one reuses: side by side, it starts after them.
        timings: tables and claims (by name and id, with stars) that measure time or memory, which no second run
            finds again: `make verify` leaves them out.
    """

    module: str
    title: str
    paper: Mapping[str, Any] = field(default_factory=dict)
    compute: str = ""
    judge: str = ""
    draw: str = ""
    digits: Mapping[str, int] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    timings: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Target | None:
        """Return the target that a file of experiments/ declares, without importing it; None where it does not."""
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TARGET":
                call = node.value
                if not isinstance(call, ast.Call):
                    raise ValueError(f"{path}: write TARGET = Target(__name__, ...)")
                words = {word.arg: word.value for word in call.keywords if word.arg and word.arg != "paper"}
                return cls(module, **{name: ast.literal_eval(value) for name, value in words.items()})
        return None

    @property
    def key(self) -> str:
        """The name everywhere: "lissa/fig1"."""
        return "/".join(self.module.split(".")[-2:])

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
        return self.key if (ROOT / "conf" / f"{self.key}.yaml").is_file() else f"{self.key}/target"

    @property
    def path(self) -> Path:
        """The file that declares it."""
        path = ROOT / "experiments" / f"{self.key}.py"
        return path if path.is_file() else path.with_suffix("") / "__init__.py"

    @property
    def description(self) -> str:
        """The docstring of that file."""
        return (ast.get_docstring(ast.parse(self.path.read_text(encoding="utf-8"))) or self.title).strip()

    @property
    def claims_file(self) -> Path | None:
        """The statements that it judges; None for a target without claims."""
        beside = ROOT / "experiments" / f"{self.key}.yaml"
        inside = beside.with_suffix("") / "claims.yaml"
        return next((path for path in (beside, inside) if path.is_file()), None)

    @property
    def paper_settings(self) -> Mapping[str, Any]:
        """The paper's settings, `paper`; of a target that was only read, those of the imported module."""
        declared: Target = self if self.paper else importlib.import_module(self.module).TARGET
        return declared.paper

    def load(self, room: str) -> Callable[..., Any]:
        """Return the function `room`: "compute", "judge" or "draw"."""
        own = importlib.import_module(self.module)
        named = getattr(self, room)
        if not named and callable(found := getattr(own, room, None)):
            return found
        module, _, name = (named or _ROOMS[room]).partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module, self.module), name)
        return function
