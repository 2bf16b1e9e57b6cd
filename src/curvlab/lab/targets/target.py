"""Targets: what declares one table or figure of a paper, or one benchmark, and how they are found, by looking."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any


def repository() -> Path:
    """Return the folder that holds `experiments/` and `conf/`: that of the `experiments` package in use."""
    spec = importlib.util.find_spec("experiments")
    if spec is None or not spec.submodule_search_locations:
        return Path(__file__).resolve().parents[4]  # the checkout that this file lies in, called from elsewhere
    return Path(next(iter(spec.submodule_search_locations))).resolve().parent


ROOT = repository()
PRESETS = ("embedded", "laptop", "paper")  # with published results, from small to large; beside them smoke


@dataclass(frozen=True)
class Target:
    """Declares a target; `TARGET` in experiments/<paper>/<item>.py, whose docstring tells what it is about.

    That module has or imports `compute(run, cfg)`, which returns tables by name ("table" becomes table.csv);
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
        digits: significant digits of a table's numbers, by its name; 6 unless told.
        after: keys of targets whose units of work this one reuses: side by side, it starts after them.
        timings: tables and claims (by name and id, with stars) that measure time or memory, which no second run
            finds again: `make verify` leaves them out.
        curves: what a tracker draws: "TABLE: Y, Y over X by COLUMN, COLUMN", the mean over the rows of each task
            and each value of the columns.
    """

    module: str
    title: str
    paper: Mapping[str, Any] = field(default_factory=dict)
    digits: Mapping[str, int] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    timings: tuple[str, ...] = ()
    curves: tuple[str, ...] = ()

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
        """The name everywhere: "lissa/fig1"; its primary config is conf/lissa/fig1.yaml."""
        return "/".join(self.module.split(".")[-2:])

    @property
    def paper_key(self) -> str:
        """The paper's key, or "benchmarks"."""
        return self.key.split("/")[0]

    @property
    def make_name(self) -> str:
        """The name in the Makefile: "lissa-fig1", "bench-speed"."""
        return self.key.replace("benchmarks/", "bench/").replace("/", "-").replace("_", "-")

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

    def curves_parsed(self) -> Iterator[tuple[str, list[str], str, list[str]]]:
        """Yield the table, the columns Y, X and the columns of `by` of each declaration of `curves`."""
        for declared in self.curves:
            table, ys, x, by = re.fullmatch(r"(\w+): (.+?) over (.+?)(?: by (.+))?", declared).groups()  # type: ignore[union-attr]  # or the declaration is wrong
            yield table, ys.split(", "), x, by.split(", ") if by else []

    @property
    def paper_settings(self) -> Mapping[str, Any]:
        """The paper's settings, `paper`; of a target that was only read, those of the imported module."""
        declared: Target = self if self.paper else importlib.import_module(self.module).TARGET
        return declared.paper

    def load(self, room: str) -> Callable[..., Any]:
        """Return the function `room`: "compute", "judge" or "draw"."""
        found: Callable[..., Any] = getattr(importlib.import_module(self.module), room)
        return found


# ------------------------------------------------------------------------------------ all of them
class UnknownTargetError(ValueError):
    """No target has this name; the text names the nearest."""


def all_targets() -> dict[str, Target]:
    """Return every target by its key, papers in the order of the report, figures and tables counted up."""
    found = _declared(ROOT / "experiments")
    return {key: found[key] for key in sorted(found, key=report_order)}


@cache
def _declared(folder: Path) -> dict[str, Target]:
    declared = [Target.read(path) for path in (*folder.glob("*/*.py"), *folder.glob("*/*/__init__.py"))]
    return {target.key: target for target in declared if target is not None}


def paper_titles() -> dict[str, str]:
    """Return a line about each folder with targets: those of papers/titles.txt, then the names of others."""
    text = (ROOT / "experiments" / "papers" / "titles.txt").read_text(encoding="utf-8")
    told = dict(line.split(": ", 1) for line in text.splitlines() if line)
    others = sorted({target.paper_key for target in _declared(ROOT / "experiments").values()} - told.keys())
    return told | {name: name for name in others}


def report_order(key: str) -> tuple[int, str, int, str, int]:
    """Return what sorts targets: papers as in `paper_titles`; tables, figures, the rest; counted up."""
    paper, item = key.split("/")
    titles, kinds = list(paper_titles()), ("tab", "fig")
    kind, number = re.fullmatch(r"(.*?)(\d*)", item).groups()  # type: ignore[union-attr]  # always matches
    paper_place = titles.index(paper) if paper in titles else len(titles)
    kind_place = kinds.index(kind) if kind in kinds else len(kinds)
    return paper_place, paper, kind_place, kind, int(number or 0)


def named_targets(names: Iterable[str]) -> list[Target]:
    """Return the targets that names stand for: "lissa-fig1", "lissa/fig1", a paper's key, "bench", "figures"."""
    targets = all_targets()
    groups = {key: [target for target in targets.values() if target.paper_key == key] for key in paper_titles()}
    groups["figures"] = [target for target in targets.values() if target.paper_key != "benchmarks"]
    groups["bench"] = groups["benchmarks"]
    known = {name: [target] for target in targets.values() for name in (target.key, target.make_name)} | groups
    chosen: dict[str, Target] = {}
    for name in names:
        if name not in known:
            others = [other for other in known if "/" not in other or "/" in name]  # as `make` has them
            near = difflib.get_close_matches(name, others, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise UnknownTargetError(f"no target {name!r}{hint} `make help` lists them all.")
        chosen |= {target.key: target for target in known[name]}
    return list(chosen.values())


# ------------------------------------------------------------------------------------ their results
Found = list[tuple[Target, Path]]


def result_folders(names: Sequence[str], root: str | Path = "results") -> Found:
    """Return targets with their result folders, of every preset and variation that was run.

    Args:
        names: of targets or of groups of them, or paths of result folders.
        root: of the results.
    """
    targets, found = all_targets(), []
    for name in names:
        key = "/".join(Path(name).resolve().parts[-3:-1])
        if (Path(name) / "run.json").is_file() and key in targets:
            found.append((targets[key], Path(name)))
            continue
        for target in named_targets([name]):
            records = sorted((Path(root) / target.key).glob("*/run.json"))
            found += [(target, record.parent) for record in records]
    return found


def published(root: str | Path = "results") -> Found:
    """Return all published results: no smoke, and no variation of a user's."""
    found = result_folders(list(all_targets()), root)
    return [(target, folder) for target, folder in found if folder.name != "smoke" and "+" not in folder.name]
