"""A training and a test text with what is needed to use and identify them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from curvlab.lab.data.splits import leading


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
    num_train: int | None,
    num_test: int | None,
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
