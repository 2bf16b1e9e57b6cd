"""English text that needs no download: the documentation inside an installed package."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import inspect
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from curvlab.lab.data.text_corpus import TextCorpus, text_corpus

MIN_WORDS = 10
TEST_EVERY = 10  # every tenth paragraph is test text
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_MARKUP = re.compile(r":(?:\w+):`~?([^`<]*?)(?:\s*<[^`>]*>)?`|``([^`]*)``|`([^`]*)`")


def load_documentation(
    root: str | Path | None = None,
    *,
    package: str = "sklearn",
    num_train: int | None = None,
    num_test: int | None = None,
) -> TextCorpus:
    """Paragraphs of prose in a package's docstrings, each once, in the order of files and lines.

    A paragraph counts as prose if it has ten words or more, opens with a capital, ends with a full stop, and nine
    of ten characters are letters or blanks. Every tenth one is test text. The text changes with the package's
    version: the checksum tells.

    Args:
        root: ignored; for the signature that all loaders share.
        package: its import name.
        num_train: keep the leading paragraphs only, and read no more files than they need.
        num_test: likewise.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"package {package!r} is not installed: choose another, e.g. data.package=sklearn")
    folder = Path(spec.submodule_search_locations[0])
    parts: tuple[list[str], list[str]] = ([], [])
    for count, paragraph in enumerate(_distinct_paragraphs(folder)):
        parts[count % TEST_EVERY == TEST_EVERY - 1].append(paragraph)
        if len(parts[0]) >= (num_train or math.inf) and len(parts[1]) >= (num_test or math.inf):
            break
    name = f"documentation of {package} {_version(package)}".strip()
    return text_corpus(name, *parts, num_train=num_train, num_test=num_test)


def _version(package: str) -> str:
    for distribution in _distributions().get(package, []):
        return importlib.metadata.version(distribution)
    return ""


@cache
def _distributions() -> Mapping[str, list[str]]:
    """Return the distributions of each importable package; reading them takes a second."""
    return importlib.metadata.packages_distributions()


def _distinct_paragraphs(folder: Path) -> Iterator[str]:
    seen = set()
    for path in sorted(folder.rglob("*.py")):
        if "tests" in path.relative_to(folder).parts:
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # templates, or syntax of other Python versions
            continue
        for docstring in _docstrings(tree):
            for paragraph in _prose(docstring):
                if paragraph not in seen:
                    seen.add(paragraph)
                    yield paragraph


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Yield docstrings without `ast.walk`, which also visits every expression: half of the time."""
    if isinstance(node, _DOCUMENTED):
        text = ast.get_docstring(node, clean=False)
        if text:
            yield inspect.cleandoc(text)
        for child in node.body:
            yield from _docstrings(child)


def _prose(docstring: str) -> Iterator[str]:
    for block in re.split(r"\n\s*\n", docstring):
        text = " ".join(_MARKUP.sub(lambda m: m[1] or m[2] or m[3] or "", block).split())
        if len(text.split()) < MIN_WORDS or not text[0].isupper() or not text.endswith("."):
            continue
        if ">>>" in text or "---" in text or sum(c.isalpha() or c == " " for c in text) < 0.9 * len(text):
            continue
        yield text
