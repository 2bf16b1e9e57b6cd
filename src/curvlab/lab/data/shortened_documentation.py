"""A toy summarisation task that needs no download: leave out the short words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from curvlab.lab.data.documentation import load_documentation
from curvlab.lab.data.summary_corpus import DocumentSummary, SummaryCorpus, summary_corpus

VALIDATION_EVERY = 10


def load_shortened_documentation(
    root: str | Path | None = None,
    *,
    package: str = "sklearn",
    num_words: int = 8,
    min_letters: int = 4,
    num_train: int | None = None,
    num_validation: int | None = None,
    num_test: int | None = None,
) -> SummaryCorpus:
    """The first words of each paragraph of `load_documentation`; the summary is those with enough letters.

    "The number of features to consider when looking" -> "number features consider when looking". Where no word has
    enough, the summary is the first one. Every tenth of the training paragraphs there is for validation; `text`
    has the others in full.

    Args:
        root: ignored; for the signature that all loaders share.
        package: its import name.
        num_words: of a document.
        min_letters: words with fewer letters are left out of the summary.
        num_train: keep the leading pairs only.
        num_validation: likewise.
        num_test: likewise.
    """
    needed = None
    if num_train is not None and num_validation is not None:  # read no more files than that
        needed = max(math.ceil(num_train / (1 - 1 / VALIDATION_EVERY)), VALIDATION_EVERY * num_validation)
    text = load_documentation(package=package, num_train=needed, num_test=num_test)
    is_validation = [index % VALIDATION_EVERY == VALIDATION_EVERY - 1 for index in range(len(text.train))]
    kept = [paragraph for paragraph, held_out in zip(text.train, is_validation, strict=True) if not held_out]

    def pairs(paragraphs: Sequence[str]) -> list[DocumentSummary]:
        return [_shortened(paragraph, num_words, min_letters) for paragraph in paragraphs]

    return summary_corpus(
        f"shortened {text.name}",
        train=pairs(kept),
        validation=pairs(text.train[VALIDATION_EVERY - 1 :: VALIDATION_EVERY]),
        test=pairs(text.test),
        num_train=num_train,
        num_validation=num_validation,
        num_test=num_test,
        text=kept,
    )


def _shortened(paragraph: str, num_words: int, min_letters: int) -> DocumentSummary:
    words = paragraph.split()[:num_words]
    kept = [word for word in words if sum(map(str.isalpha, word)) >= min_letters]
    return " ".join(words), " ".join(kept or words[:1])
