"""Plain text: the Penn Treebank, the documentation of installed packages, text sets of the Hugging Face hub."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path

from curvlab.lab.data.download import check_known, not_found, reading_hub
from curvlab.lab.data.splits import Count, Root, leading


def as_it_is(text: str) -> str:
    """Return the text unchanged."""
    return text


@dataclass(frozen=True)
class TextCorpus:
    """Documents (lines, paragraphs, articles) of plain text.

    Attributes:
        name: as on the command line, `data=name`.
        train: training documents.
        test: test documents.
        checksum: sha256 of both.
        prepare: brings other text into the form that the corpus has (lower case, without commas, ...), so that a
            model trained on the corpus can read it.
    """

    name: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    checksum: str
    prepare: Callable[[str], str] = field(default=as_it_is, compare=False)


def text_corpus(
    name: str,
    train: Sequence[str],
    test: Sequence[str],
    *,
    num_train: Count,
    num_test: Count,
    prepare: Callable[[str], str] = as_it_is,
) -> TextCorpus:
    """Return the corpus of the leading `num_train` and `num_test` documents (None: all of them)."""
    kept_train = tuple(train[: leading(num_train, len(train), setting="num_train", name=name)])
    kept_test = tuple(test[: leading(num_test, len(test), setting="num_test", name=name)])
    digest = hashlib.sha256()
    for part in (kept_train, kept_test):
        digest.update(f"{len(part)}\n".encode())
        for document in part:
            digest.update(document.encode() + b"\0")
    return TextCorpus(name=name, train=kept_train, test=kept_test, checksum=digest.hexdigest(), prepare=prepare)


# ---------------------------------------------------------------------- the Penn Treebank
_QUOTES = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"'})
_NUMBER = re.compile(r"(?<![\w-])\d[\d,.]*\d(?![\w-])|(?<![\w-])\d(?![\w-])")
_CONTRACTION = re.compile(r"(n't|'s|'re|'ve|'ll|'d|'m)\b")
# A full stop belongs to a word only in abbreviations (mr., u.s.), which are none at the end of a sentence.
_PUNCTUATION = re.compile(r"[^\w\s.$&%'-]|\.(?=\s|$)")
_NOT_ABBREVIATED = re.compile(r"^(mr|mrs|ms|dr|inc|corp|co|st|jr|[a-z](\.[a-z])*)\.$")


def load_penn_treebank(root: Root, *, num_train: Count = None, num_test: Count = None) -> TextCorpus:
    """Lines of `root/ptb/ptb.{train,test}.txt`: 42,068 and 3,761 sentences of newspaper text.

    The text is licensed, so there is no download: put the two files there.
    """
    parts = {}
    for part in ("train", "test"):
        path = Path(root) / "ptb" / f"ptb.{part}.txt"
        if not path.is_file():
            raise not_found("ptb", path, reason="The Penn Treebank cannot be downloaded freely")
        check_known(Path(root), f"ptb/{path.name}")
        parts[part] = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return text_corpus(
        "ptb", parts["train"], parts["test"], num_train=num_train, num_test=num_test, prepare=like_penn_treebank
    )


def like_penn_treebank(text: str) -> str:
    """Return a sentence in the corpus's form: lower case, N for numbers, " 's" apart, no punctuation.

    Words that the corpus replaced by <unk> stay: a byte-pair encoder can spell them, and names are what sentences
    are told apart by.
    """
    text = _NUMBER.sub(" N ", text.translate(_QUOTES))
    words = [word if word == "N" else word.lower() for word in text.split()]
    text = _CONTRACTION.sub(r" \1", " ".join(words))
    kept = [word if _NOT_ABBREVIATED.match(word) else _PUNCTUATION.sub(" ", word) for word in text.split()]
    return " ".join(" ".join(kept).split())


# ---------------------------------------------------------------------- documentation
MIN_WORDS = 10
TEST_EVERY = 10  # every tenth paragraph is test text
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_MARKUP = re.compile(r":(?:\w+):`~?([^`<]*?)(?:\s*<[^`>]*>)?`|``([^`]*)``|`([^`]*)`")


def load_documentation(
    root: Root | None = None, *, package: str = "sklearn", num_train: Count = None, num_test: Count = None
) -> TextCorpus:
    """Paragraphs of prose in a package's docstrings, each once, in the order of files and lines.

    A paragraph counts as prose if it has ten words or more, opens with a capital, ends with a full stop, and nine
    of ten characters are letters or blanks. Every tenth one is test text. The text changes with the package's
    version: the checksum tells. `package` is an import name; no more files are read than `num_train` and
    `num_test` need.
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


# ---------------------------------------------------------------------- the hub
def load_hub_text(
    root: Root | None = None,
    *,
    name: str,
    split: str = "train",
    column: str = "text",
    num_train: int,
    num_test: int,
) -> TextCorpus:
    """Leading documents of a text set: the first `num_test` are test text, the next `num_train` training text.

    Args:
        root: ignored; for the signature that all loaders share.
        name: on the hub (e.g. Skylion007/openwebtext), or a local folder of JSON lines or Parquet files.
        split: the part that is read.
        column: that holds the text.
        num_train: training documents.
        num_test: test documents.
    """
    import datasets

    if num_train < 1 or num_test < 1:
        raise ValueError(f"num_train and num_test must be at least 1, got {num_train} and {num_test}")
    try:
        with reading_hub(name) as label:
            rows = datasets.load_dataset(name, split=split, streaming=True)
            texts = [str(row[column]) for row in islice(rows, num_test + num_train)]
    except KeyError as error:
        raise ValueError(f"{name} has no column {error}: set data.column to the one that holds the text") from None
    return text_corpus(label, texts[num_test:], texts[:num_test], num_train=num_train, num_test=num_test)
