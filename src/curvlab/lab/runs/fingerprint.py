"""What code a unit of work was made by: a hash of all first-party modules that its function can reach."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

# They keep, describe and show numbers, and make none: a change in them makes no result stale.
BOOKKEEPING = (
    "curvlab.lab.runs",
    "curvlab.lab.reporting",
    "curvlab.atomic_file",
    "curvlab.checkpoint",
    "curvlab.tensor_file",
    "curvlab.lab.target",
)
_LENGTH = 16
_UNREADABLE = "no source file"


def code_roots(compute: Callable[..., Any], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the modules to start from: of the function, of what is bound to it, and of `_target_`s in `config`.

    Args:
        compute: a function, or a `functools.partial` of one; functions and objects of ours among its arguments
            count, since it may call them.
        config: the unit's config; classes that Hydra makes from it are code as well.
    """
    own = set(_modules_of(compute)) | set(_targets(config))
    packages = {"curvlab", function_name(compute).partition(":")[0].partition(".")[0]}
    return tuple(sorted(name for name in own if name.partition(".")[0] in packages and not _is_bookkeeping(name)))


def fingerprint(roots: Iterable[str]) -> str:
    """Return a hash of the modules `roots` and of all that they import, without docstrings, comments and layout.

    First-party modules are those of the roots' top-level packages. Imports inside functions count, those under
    `if TYPE_CHECKING` do not; `from package import name` leads to the module that defines the name, not to all
    that the package holds. Left out: `BOOKKEEPING`.
    """
    return fingerprint_of(reachable_code(roots))


def fingerprint_of(code: Mapping[str, str]) -> str:
    """Return the hash of modules by their own hashes, see `reachable_code`."""
    text = "\n".join(f"{name} {code[name]}" for name in sorted(code))
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


def reachable_code(
    roots: Iterable[str],
    imports: Mapping[str, Iterable[str]] | None = None,
    without: Collection[str] = (),
) -> dict[str, str]:
    """Return a hash for each module that `fingerprint` takes in, by its name.

    Args:
        roots: modules to start from.
        imports: what some modules imported before, in place of what they import today.
        without: modules that there were not then.
    """
    waiting, found = list(roots), {}
    while waiting:
        name = waiting.pop()
        if name in found or name in without or _is_bookkeeping(name):
            continue
        found[name], imported = _read(name)
        waiting.extend((imports or {}).get(name, imported))
    return found


def code_and_imports(name: str, source: str | None = None) -> tuple[str, frozenset[str]]:
    """Return a module's hash as in `reachable_code`, and the first-party modules that it imports.

    Args:
        name: of the module.
        source: its text; by default that of its file.
    """
    code, imported = _read(name) if source is None else _hash(name, ast.parse(source))
    return code, frozenset(imported)


def source_files(roots: Iterable[str]) -> list[Path]:
    """Return the files of the modules that `fingerprint` takes in."""
    return [path for name in reachable_code(roots) if (path := _file_of(name)) is not None]


def function_name(compute: Callable[..., Any]) -> str:
    """Return "module:function" of a function or of a `functools.partial` of one."""
    while isinstance(compute, partial):
        compute = compute.func
    return f"{compute.__module__}:{getattr(compute, '__qualname__', type(compute).__qualname__)}"


def _modules_of(value: Any) -> Iterator[str]:
    if isinstance(value, partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _modules_of(part)
        return
    module = getattr(value, "__module__", None) if callable(value) else type(value).__module__
    if isinstance(module, str):
        yield module


def _targets(config: Any) -> Iterator[str]:
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key == "_target_" and isinstance(value, str):
                yield from _resolve(*value.rpartition(".")[::2])
            else:
                yield from _targets(value)
    elif isinstance(config, list | tuple):
        for value in config:
            yield from _targets(value)


def _is_bookkeeping(name: str) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in BOOKKEEPING)


@cache
def _read(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the hash of one module, and the first-party modules that it imports."""
    tree = _tree(name)
    return (_UNREADABLE, ()) if tree is None else _hash(name, tree)


def _hash(name: str, tree: ast.Module) -> tuple[str, tuple[str, ...]]:
    imported = sorted(set(_imported(name, tree)) - {name})
    return hashlib.sha256(ast.dump(_DocstringRemover().visit(tree)).encode()).hexdigest(), tuple(imported)


@cache
def _tree(name: str) -> ast.Module | None:
    path = _file_of(name)
    return None if path is None else ast.parse(path.read_text(encoding="utf-8"))


@cache
def _file_of(name: str) -> Path | None:
    """Return the module's file, found without importing it; None for what has none (a notebook's cell)."""
    top, *inner = name.split(".")
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if loaded is not None:
        return Path(loaded)
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # __main__ of an interactive session
        return None
    if spec is None:
        return None
    if not inner:
        return Path(spec.origin) if spec.origin is not None and spec.has_location else None
    for folder in spec.submodule_search_locations or ():
        path = Path(folder).joinpath(*inner)
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def _imported(name: str, tree: ast.Module) -> Iterator[str]:
    top = name.partition(".")[0]
    ours = {"curvlab", top}
    for node in _nodes_that_run(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in ours)
        elif isinstance(node, ast.ImportFrom):
            base = _base(name, node)
            if base.partition(".")[0] in ours:
                for alias in node.names:
                    yield from _resolve(base, alias.name)


def _nodes_that_run(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from _nodes_that_run(node)


def _base(name: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    path = _file_of(name)
    parts = name.split(".") if path is not None and path.name == "__init__.py" else name.split(".")[:-1]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _resolve(base: str, name: str) -> Iterator[str]:
    """Yield the module that `from base import name` is about."""
    if _file_of(f"{base}.{name}") is not None:
        yield f"{base}.{name}"
        return
    path = _file_of(base)
    if path is None:
        return
    if path.name == "__init__.py" and name != "*":
        tree = _tree(base)
        for node in _nodes_that_run(tree) if tree is not None else ():
            if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
                original = next(a.name for a in node.names if (a.asname or a.name) == name)
                yield from _resolve(_base(base, node), original)
                return
    yield base


class _DocstringRemover(ast.NodeTransformer):
    """Leaves the tree fit for `_imported`: imports are no docstrings."""

    def _visit(self, node: Any) -> Any:
        self.generic_visit(node)
        first = node.body[0] if node.body else None
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            node.body = node.body[1:] or [ast.Pass()]
        return node

    visit_Module = visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _visit  # ast's names
