"""The site: `make site` builds README, results, docs, notebooks and the reference with Sphinx, offline.

The source folder is the root of the repository, so that links lead where they lead on a host. What is not written
by hand is made here: a page of reference for each package, and the rows of the table of all claims.
"""

# ruff: noqa: PLR0917  (Sphinx calls by place)
import html
import importlib
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from curvlab.lab.names import for_readers
from curvlab.lab.reporting.results import read_results

ROOT = Path(__file__).parents[1]
PACKAGES = [
    "linalg",
    "problem",
    "curvature",
    "spectrum",
    "solvers",
    "training",
    "influence",
    "optim",
    "sampling",
    "parallel",
]
CONTENTS = ROOT / "docs" / "contents.md"

project = "curvlab"
author = "the curvlab authors"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "README"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/**.md",
    "results/**.md",
    "notebooks/*.ipynb",
]
exclude_patterns = [".*", "**/.*", "outputs", "multirun", "data", "src", "tests", "experiments", "conf", "build"]
exclude_patterns += ["docs/contents.md", "docs/llms.txt", "wandb"]

html_theme = "furo"
html_title = "curvlab"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["claims.js"]
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
html_additional_pages = {"index": "redirect.html"}
templates_path = ["_templates"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # they are committed with what they show
nb_merge_streams = True
suppress_warnings = [
    "myst.header",  # a page may begin below the first level
    "ref.python",  # a name that two packages give
]
autodoc_default_options = {"members": True, "imported-members": True, "show-inheritance": True}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes stand in the class's own list


# ------------------------------------------------------------------------------------ pages made here
def reference_page(package: str) -> str:
    """Return the page of a package: its first words, and every name of its __all__."""
    module = importlib.import_module(f"curvlab.{package}")
    values = [
        name
        for name in module.__all__
        if not inspect.isroutine(own := getattr(module, name)) and not isinstance(own, type)
    ]
    lines = [
        f".. automodule:: curvlab.{package}",
        *(f".. autodata:: curvlab.{package}.{name}\n   :no-value:" for name in values),
    ]
    return "\n".join([f"# curvlab.{package}", "", "```{eval-rst}", "\n\n".join(lines), "```", ""])


def write_reference(app: Sphinx, _: object) -> None:
    """Write a page for each package below docs/reference, which git ignores."""
    folder = ROOT / "docs" / "reference"
    folder.mkdir(exist_ok=True)
    for package in PACKAGES:
        path, text = folder / f"{package}.md", reference_page(package)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def claim_rows() -> str:
    """Return the rows of the table of all claims."""
    rows = []
    for folder in read_results(ROOT / "results"):
        told = for_readers([result.claim.statement for result in folder.claims])
        for result in folder.claims:
            interval, ours = result.interval, shown(result.value) or "not measured"
            if interval and interval.low != interval.high:
                ours += f" ({shown(interval.low)} to {shown(interval.high)})"
            cells = {
                "target": f'<a href="../results/{folder.paper}/README.html">{folder.target}</a>',
                "preset": folder.preset,
                "claim": html.escape(told(result.claim.statement)),
                "paper": html.escape(shown(result.claim.paper_value)),
                "ours": html.escape(ours),
                "needed": html.escape(str(result.claim.criterion)),
                "verdict": result.verdict,
            }
            filled = "".join(f'<td data-label="{name}">{cell}</td>' for name, cell in cells.items())
            marks = "".join(f' data-{name}="{cells[name]}"' for name in ("preset", "verdict"))
            rows.append(f'<tr data-paper="{folder.paper}"{marks}>{filled}</tr>')
    return "\n".join(rows)


def shown(value: float | str | None) -> str:
    """Return a number with four digits, other text as it is, and nothing for None."""
    return f"{value:.4g}" if isinstance(value, int | float) else value or ""


def complete(app: Sphinx, name: str, source: list[str]) -> None:
    """Add the table of contents to the README and the rows to the claims; a link to a folder becomes its text."""
    if name == root_doc:
        source[0] += "\n" + CONTENTS.read_text(encoding="utf-8")
    if name == "docs/claims":
        source[0] = source[0].replace("<!-- rows -->", claim_rows())
    here = (ROOT / name).parent

    def without_folder(match: re.Match[str]) -> str:
        return match[1] if (here / match[2]).is_dir() else match[0]

    if not name.startswith("notebooks/"):
        source[0] = re.sub(r"(?<!!)\[([^\]\n]+)\]\(([^)#:\n]+)\)", without_folder, source[0])


# ------------------------------------------------------------------------------------ docstrings
_SECTION = re.compile(r"^(Args|Arguments|Attributes|Returns|Yields|Raises|Note|Example|Examples):\s*$")


def as_rst(app: Sphinx, what: str, name: str, item: Any, options: Any, lines: list[str]) -> None:
    """Make reStructuredText of a docstring as it is written here: prose with Markdown's code, Google's sections.

    Names in single backticks become code, signs that mean something to reStructuredText are escaped, and indented
    blocks outside of sections are shown as they stand.
    """
    if what == "data" and isinstance(item, dict):  # its docstring is that of every dict
        lines[:] = [f"``{item!r}``", ""]
    found: list[str] = []
    section, literal = False, False
    for line in lines:
        indented = line.startswith("    ")
        if not line.strip():
            found.append("")
            continue
        if not indented:
            section, literal = bool(_SECTION.match(line)), False
        if section or line.startswith(">>>"):
            found.append(line if line.lstrip().startswith(">>>") else _escaped(line))
            continue
        if indented and not literal:
            ends_open = bool(found) and next((each for each in reversed(found) if each), "").rstrip().endswith(
                "::"
            )
            if found and found[-1]:
                found.append("")
            found += [] if ends_open else ["::", ""]
            literal = True
        found.append(line if literal else _escaped(line))
    lines[:] = found


def _escaped(line: str) -> str:
    parts = re.split(r"(``[^`]+``|`[^`]+`)", line)
    for place, part in enumerate(parts):
        if place % 2:
            parts[place] = f"``{part.strip('`')}``"
            if parts[place + 1][:1].isalnum():
                parts[place + 1] = "\\ " + parts[place + 1]
        else:
            parts[place] = re.sub(r"([*|\\])|(?<=\w)(_)(?!\w)", r"\\\1\2", part)
    return "".join(parts)


def public_names() -> dict[str, object]:
    """Return every public name of the library, "curvlab.influence.influence", with what it is."""
    modules = {package: importlib.import_module(f"curvlab.{package}") for package in PACKAGES}
    return {
        f"curvlab.{package}.{name}": getattr(module, name)
        for package, module in modules.items()
        for name in module.__all__
    }


def setup(app: Sphinx) -> None:
    """Connect what this file does to the build."""
    app.connect("config-inited", write_reference)
    app.connect("source-read", complete)
    app.connect("autodoc-process-docstring", as_rst, priority=100)  # before napoleon
