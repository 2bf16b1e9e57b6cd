"""Documents with their summaries: XSum (Narayan et al. 2018), sets of the hub, and a toy set without download."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from curvlab.lab.data.download import check_known, not_found, reading_hub
from curvlab.lab.data.splits import Count, Root, fixed_permutation, leading
from curvlab.lab.data.text import load_documentation

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
    pairs: Mapping[str, Sequence[DocumentSummary]],
    wanted: Mapping[str, Count],
    text: Sequence[str] | None = None,
) -> SummaryCorpus:
    """Return the leading pairs of train, validation and test, every run of blanks and line breaks as one space.

    `text`, one for each training pair, is cut like them; None: the documents of the pairs.
    """
    digest = hashlib.sha256()
    parts = {}
    for part, own in pairs.items():
        count = leading(wanted[part], len(own), setting=f"num_{part}", name=name)
        parts[part] = tuple((_one_line(document), _one_line(summary)) for document, summary in own[:count])
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


# ---------------------------------------------------------------------- XSum and the hub
FILES = ("test.jsonl", "test_extra.jsonl")
NUM_TEST, NUM_VALIDATION = 200, 126


def load_xsum(
    root: Root, *, num_train: Count = None, num_validation: Count = None, num_test: Count = None
) -> SummaryCorpus:
    """Pairs of XSum's test set from `root/xsum/test.jsonl` and `test_extra.jsonl`, in a split of our own.

    The 1,926 pairs are shuffled by a fixed permutation; 200 are for testing, 126 for validation, 1,600 for
    training. It is not the split of the paper, which trains on 204,045 other pairs: that is `load_hub_summaries`.
    """
    pairs: list[DocumentSummary] = []
    for file in FILES:
        path = Path(root) / "xsum" / file
        if not path.is_file():
            raise not_found("xsum", path, reason="For the whole set from the Hugging Face hub take data=xsum_hub")
        check_known(Path(root), f"xsum/{file}")
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        pairs += [(row["document"], row["summary"]) for row in rows]
    shuffled = [pairs[index] for index in fixed_permutation(len(pairs))]
    held_out = NUM_TEST + NUM_VALIDATION
    test, validation, train = shuffled[:NUM_TEST], shuffled[NUM_TEST:held_out], shuffled[held_out:]
    parts = {"train": train, "validation": validation, "test": test}
    return summary_corpus("xsum", parts, {"train": num_train, "validation": num_validation, "test": num_test})


def load_hub_summaries(
    root: Root | None = None,
    *,
    name: str = "EdinburghNLP/xsum",
    revision: str | None = None,
    document: str = "document",
    summary: str = "summary",
    num_train: Count = None,
    num_validation: Count = None,
    num_test: Count = None,
) -> SummaryCorpus:
    """Pairs of a set on the Hugging Face hub, in the splits train, validation and test that it has there.

    Args:
        root: ignored; for the signature that all loaders share.
        name: on the hub, or a local folder of JSON lines or Parquet files named after the splits.
        revision: branch or commit; refs/convert/parquet where the hub has a loading script, which `datasets` no
            longer runs.
        document: column that holds the document.
        summary: column that holds its summary.
        num_train: keep the leading pairs only.
        num_validation: likewise.
        num_test: likewise.
    """
    import datasets

    with reading_hub(name) as label:
        splits = datasets.load_dataset(name, revision=revision)
    wanted = {"train": num_train, "validation": num_validation, "test": num_test}
    parts = {part: _pairs(splits, part, document, summary, name=name) for part in wanted}
    return summary_corpus(label, parts, wanted)


def _pairs(splits: Any, part: str, document: str, summary: str, *, name: str) -> list[DocumentSummary]:
    columns = splits[part].column_names if part in splits else []
    if document not in columns or summary not in columns:
        raise ValueError(
            f"{name} has no {part!r} with the columns {document!r} and {summary!r}, only "
            f"{dict(splits.column_names)}: set data.document and data.summary"
        )
    return list(zip(splits[part][document], splits[part][summary], strict=True))


# ---------------------------------------------------------------------- documentation, shortened
VALIDATION_EVERY = 10


def load_shortened_documentation(
    root: Root | None = None,
    *,
    package: str = "sklearn",
    num_words: int = 8,
    min_letters: int = 4,
    num_train: Count = None,
    num_validation: Count = None,
    num_test: Count = None,
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

    validation = pairs(text.train[VALIDATION_EVERY - 1 :: VALIDATION_EVERY])
    parts = {"train": pairs(kept), "validation": validation, "test": pairs(text.test)}
    wanted = {"train": num_train, "validation": num_validation, "test": num_test}
    return summary_corpus(f"shortened {text.name}", parts, wanted, kept)


def _shortened(paragraph: str, num_words: int, min_letters: int) -> DocumentSummary:
    words = paragraph.split()[:num_words]
    kept = [word for word in words if sum(map(str.isalpha, word)) >= min_letters]
    return " ".join(words), " ".join(kept or words[:1])
