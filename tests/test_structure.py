"""The tree keeps its rules: one-way imports, short files, docstrings, tests that mirror src."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "curvlab"

# What a layer may import, besides itself. Lower layers first; peers in one row do not import each other.
ORDER = [
    ["linalg"],
    ["problem"],
    ["curvature"],
    ["spectrum"],
    ["solvers"],
    ["training"],
    ["influence", "optim"],
    ["sampling"],
    ["parallel"],
    ["lab"],
]


def layers() -> list[str]:
    return sorted(path.name for path in SRC.iterdir() if path.is_dir() and any(path.rglob("*.py")))


def python_files(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_modules(path: Path, *, runtime: bool = False) -> Iterator[str]:
    """Yield the absolute names of all imports, those inside functions included; `runtime`: not those for types."""
    package = ["curvlab", *path.relative_to(SRC).parts[:-1]] if path.is_relative_to(SRC) else []
    tree = RuntimeOnly().visit(ast.parse(path.read_text())) if runtime else parsed(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imported_layers(path: Path) -> set[str]:
    parts = [name.split(".") for name in imported_modules(path)]
    return {part[1] for part in parts if part[0] == "curvlab" and len(part) > 1 and (SRC / part[1]).is_dir()}


def test_every_layer_has_a_place_in_the_order() -> None:
    known = {layer for row in ORDER for layer in row}
    assert set(layers()) <= known


@pytest.mark.parametrize("layer", layers())
def test_imports_flow_one_way(layer: str) -> None:
    height = next(i for i, row in enumerate(ORDER) if layer in row)
    allowed = {layer} | {lower for row in ORDER[:height] for lower in row}
    for path in python_files(SRC / layer):
        assert imported_layers(path) <= allowed, relative(path)


@pytest.mark.parametrize("path", sorted(SRC.glob("*.py")), ids=relative)
def test_modules_beside_the_layers_import_no_layer(path: Path) -> None:
    # Every layer may therefore import them.
    assert imported_layers(path) == set()


# ------------------------------------------------------------------------------- between modules
def module_name(path: Path) -> str:
    parts = ["curvlab", *path.relative_to(SRC).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in python_files(SRC)}


class RuntimeOnly(ast.NodeTransformer):
    """Leaves out what stands under `if TYPE_CHECKING:`."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        checks_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return node.orelse if checks_types else self.generic_visit(node)


def runtime_imports(path: Path) -> set[str]:
    """Return the modules of ours that a module imports when it runs, also inside functions."""
    found = set()
    for node in ast.walk(RuntimeOnly().visit(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in MODULES else node.module)
    return (found & set(MODULES)) - {module_name(path)}


def cycle_among(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules left when those that import no other module left are taken away, again and again."""
    left = {name: set(targets) for name, targets in imports.items()}
    while free := [name for name, targets in left.items() if not targets & set(left)]:
        for name in free:
            del left[name]
    return sorted(left)


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    assert cycle_among({name: runtime_imports(path) for name, path in MODULES.items()}) == []
    assert cycle_among({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


@pytest.mark.parametrize("path", python_files(SRC), ids=relative)
def test_private_names_stay_in_their_module(path: Path) -> None:
    private = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "curvlab"
        for alias in node.names
        if alias.name.startswith("_") or any(part.startswith("_") for part in (node.module or "").split("."))
    ]
    assert private == [], "another module's private names"


def private_attributes_of_others(tree: ast.Module) -> set[str]:
    """Return private attributes read from other objects that no class or function of the module itself sets."""
    own, used = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            (own if isinstance(node.ctx, ast.Store) or of_self else used).add(node.attr)
    return used - own


@pytest.mark.parametrize("layer", ["linalg", "curvature", "spectrum", "solvers"])
def test_objects_keep_their_private_attributes_to_themselves(layer: str) -> None:
    torch_versions = {"_version"}  # how often a tensor was changed in place: PyTorch has no public name for it
    for path in python_files(SRC / layer):
        assert private_attributes_of_others(parsed(path)) <= torch_versions, relative(path)
    assert private_attributes_of_others(ast.parse("def f(op): return op._batches")) == {"_batches"}


def curvature_classes_asked_for(source: str, classes: set[str]) -> set[str]:
    """Return the classes of curvature that stand in an isinstance(...)."""
    calls = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
    ]
    names = {getattr(name, "id", getattr(name, "attr", "")) for call in calls for name in ast.walk(call.args[1])}
    return names & classes


def test_solvers_ask_no_operator_for_its_class() -> None:
    classes = {
        node.name
        for path in python_files(SRC / "curvature")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
    }
    assert curvature_classes_asked_for("isinstance(x, int | DataOperator)", classes) == {"DataOperator"}
    for path in python_files(SRC / "solvers"):
        assert curvature_classes_asked_for(path.read_text(), classes) == set(), relative(path)


def test_the_library_does_not_import_experiments() -> None:
    for path in python_files(SRC):
        assert not [name for name in imported_modules(path) if name.split(".")[0] in ("experiments", "tests")], (
            path
        )


def test_relative_imports_are_resolved() -> None:
    # The check above is worth what `imported_layers` finds: here it must find something.
    assert imported_layers(SRC / "curvature" / "gauss_newton.py") == {"curvature", "problem"}
    assert imported_layers(SRC / "curvature" / "operator.py") == {"curvature", "linalg", "problem"}


def test_files_are_short_and_well_named() -> None:
    files = python_files(SRC, ROOT / "experiments")
    assert [relative(path) for path in files if len(path.read_text().splitlines()) > 450] == []
    assert [relative(path) for path in files if path.stem in ("util", "utils", "helpers", "misc", "common")] == []


def test_folders_hold_at_most_fifteen_files() -> None:
    found = {
        relative(folder): len(list(folder.glob("*.py")))
        for top in ("src", "tests", "experiments")
        for folder in [ROOT / top, *(ROOT / top).rglob("*/")]
    }
    assert {name: count for name, count in found.items() if count > 15} == {}


# Groups of Hydra whose files users choose by name (`task=NAME`): a folder below would change the names.
CHOSEN_BY_NAME = {"conf/task": 64, "conf/data": 23}


def test_folders_of_conf_hold_at_most_fifteen_files_but_for_two_groups() -> None:
    found = {relative(folder): len(list(folder.glob("*.yaml"))) for folder in (ROOT / "conf").rglob("*/")}
    larger = {name: count for name, count in found.items() if count > CHOSEN_BY_NAME.get(name, 15)}
    assert larger == {}, "no new task or data set: override one (`task@tasks.NAME: OTHER`), or remove one"
    assert max(found.values()) > 15  # otherwise nothing is left to except


def floors(imports: dict[str, set[str]]) -> int:
    """Return how many modules stand above each other in the longest chain of imports."""
    heights: dict[str, int] = {}
    while left := {name: targets & set(imports) - set(heights) for name, targets in imports.items()}:
        free = [name for name, targets in left.items() if name not in heights and not targets]
        if not free:
            break
        heights |= {
            name: 1 + max((heights[below] for below in imports[name] & set(heights)), default=0) for name in free
        }
    return max(heights.values(), default=0)


def floors_of(folder: Path) -> int:
    paths = {path.stem: path for path in folder.glob("*.py") if path.name != "__init__.py"}
    home = ".".join(folder.relative_to(ROOT / "src" if folder.is_relative_to(SRC) else ROOT).parts)
    names = {stem: f"{home}.{stem}" for stem in paths}
    imports = {stem: set(imported_modules(path, runtime=True)) for stem, path in paths.items()}
    return floors({stem: {other for other in paths if names[other] in imports[stem]} - {stem} for stem in paths})


def test_folders_have_at_most_six_floors_of_imports() -> None:
    folders = [folder for top in (SRC, ROOT / "experiments") for folder in [top, *top.rglob("*/")]]
    assert {relative(folder): count for folder in folders if (count := floors_of(folder)) > 6} == {}
    assert floors_of(SRC / "curvature") == 6  # linearise, operator, gauss_newton, fisher, examples, rows
    assert floors({"a": {"b"}, "b": {"c"}, "c": {"outside"}, "d": {"c"}}) == 3


def public_definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, ast.FunctionDef) and "overload" in map(ast.unparse, node.decorator_list):
            continue  # its docstring is the implementation's
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith(
            "_"
        ):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body, f"{prefix}{node.name}.")


def test_every_public_name_has_a_docstring() -> None:
    undocumented = []
    for path in python_files(SRC):
        tree = parsed(path)
        names = [name for name, node in public_definitions(tree.body) if not ast.get_docstring(node)]
        undocumented += [f"{relative(path)}: {name}" for name in names]
        if path.name != "__init__.py" and not ast.get_docstring(tree):
            undocumented.append(f"{relative(path)} does not say what it is for")
    assert undocumented == []


def test_tests_mirror_src() -> None:
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("*/test_*.py")}
    assert set(layers()) - folders == set(), "layers without tests"
    assert folders - set(layers()) <= {"experiments", "conformance"}, "tests of nothing"


def test_results_are_small_and_a_figure_has_one_picture_and_at_most_one_more() -> None:
    paths = [path for path in (ROOT / "results").rglob("*") if path.is_file()]
    published = [
        path for path in paths if not any(word in path.as_posix() for word in ("/smoke/", "+", "/sweep/"))
    ]
    assert sum(path.stat().st_size for path in published) <= 15e6
    assert not [path for path in published if path.with_name(f"{path.name}.bz2") in published], "a table twice"
    pictures = {path for path in published if path.suffix == ".png" and not path.name.startswith("images_")}
    assert {path.name for path in pictures} <= {"findings.png", "figure.png", "figure_more.png"}
