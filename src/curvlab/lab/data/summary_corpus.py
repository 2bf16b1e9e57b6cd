"""Documents with their summaries, and what is needed to identify them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from curvlab.lab.data.splits import leading

DocumentSummary: TypeAlias = tuple[str, str]


@dataclass(frozen=True)
class SummaryCorpus:
    """Pairs of a document and its summary.

    Attributes:
        name: as on the command line, `data=name`.
        train: training pairs.
        validation: pairs to choose settings by.
        test: pairs to measure on.
        text: documents in full that go with the training pairs, for tokenizers and pretraining.
        checksum: sha256 of all.
    """

    name: str
    train: tuple[DocumentSummary, ...]
    validation: tuple[DocumentSummary, ...]
    test: tuple[DocumentSummary, ...]
    text: tuple[str, ...]
    checksum: str


def summary_corpus(
    name: str,
    train: Sequence[DocumentSummary],
    validation: Sequence[DocumentSummary],
    test: Sequence[DocumentSummary],
    *,
    num_train: int | None,
    num_validation: int | None,
    num_test: int | None,
    text: Sequence[str] | None = None,
) -> SummaryCorpus:
    """Return the leading pairs of each part, every run of blanks and line breaks as one space.

    `text`, one for each training pair, is cut like them; None: the documents of the pairs.
    """
    digest = hashlib.sha256()
    parts = {}
    for part, pairs, wanted in (
        ("train", train, num_train),
        ("validation", validation, num_validation),
        ("test", test, num_test),
    ):
        count = leading(wanted, len(pairs), setting=f"num_{part}", name=name)
        parts[part] = tuple((_one_line(document), _one_line(summary)) for document, summary in pairs[:count])
        digest.update(f"{count}\n".encode())
        for document, summary in parts[part]:
            digest.update(document.encode() + b"\0" + summary.encode() + b"\0")
    whole = [document for document, _ in parts["train"]] if text is None else text[: len(parts["train"])]
    kept = tuple(_one_line(document) for document in whole)
    for document in kept:
        digest.update(document.encode() + b"\0")
    return SummaryCorpus(name, **parts, text=kept, checksum=digest.hexdigest())


def copying_pairs(
    documents: Sequence[str], *, num_words: int, num_copied: int, max_stretches: int | None = None
) -> list[DocumentSummary]:
    """Return stretches of `num_words` words, each with its first `num_copied` words as the "summary".

    A task for pretraining that needs no summaries: it teaches an encoder-decoder to read, and to write what a
    document begins with, which for news is a summary of sorts. The words left over at the end of a document are
    not used, unless it is shorter than one stretch.

    Args:
        documents: texts.
        num_words: of a stretch.
        num_copied: words of the target.
        max_stretches: of one document; None: all that fit.
    """
    if not 1 <= num_copied <= num_words:
        raise ValueError(f"num_copied must be between 1 and num_words={num_words}, got {num_copied}")
    pairs = []
    for document in documents:
        words = document.split()
        starts = range(0, max(len(words) - num_words, 0) + 1, num_words)
        for start in starts[:max_stretches]:
            stretch = words[start : start + num_words]
            pairs.append((" ".join(stretch), " ".join(stretch[:num_copied])))
    return pairs


def _one_line(text: str) -> str:
    return " ".join(text.split())
