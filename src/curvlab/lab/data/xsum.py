"""XSum (Narayan et al. 2018): news articles with a summary of one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from curvlab.lab.data.errors import damaged, not_found
from curvlab.lab.data.splits import fixed_permutation
from curvlab.lab.data.summary_corpus import DocumentSummary, SummaryCorpus, summary_corpus

FILES = ("test.jsonl", "test_extra.jsonl")
NUM_TEST, NUM_VALIDATION = 200, 126


def load_xsum(
    root: str | Path,
    *,
    num_train: int | None = None,
    num_validation: int | None = None,
    num_test: int | None = None,
) -> SummaryCorpus:
    """Pairs of XSum's test set from `root/xsum/test.jsonl` and `test_extra.jsonl`, in a split of our own.

    The 1,926 pairs are shuffled by a fixed permutation; 200 are for testing, 126 for validation, 1,600 for
    training. It is not the split of the paper, which trains on 204,045 other pairs: that is `load_hub_summaries`.

    Args:
        root: data root.
        num_train: keep the leading pairs only.
        num_validation: likewise.
        num_test: likewise.
    """
    pairs: list[DocumentSummary] = []
    for file in FILES:
        path = Path(root) / "xsum" / file
        if not path.is_file():
            raise not_found("xsum", path, reason="For the whole set from the Hugging Face hub take data=xsum_hub")
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            pairs += [(str(row["document"]), str(row["summary"])) for row in rows]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise damaged(path, error) from error
    shuffled = [pairs[index] for index in fixed_permutation(len(pairs))]
    held_out = NUM_TEST + NUM_VALIDATION
    return summary_corpus(
        "xsum",
        train=shuffled[held_out:],
        validation=shuffled[NUM_TEST:held_out],
        test=shuffled[:NUM_TEST],
        num_train=num_train,
        num_validation=num_validation,
        num_test=num_test,
    )


def load_hub_summaries(
    root: str | Path | None = None,
    *,
    name: str = "EdinburghNLP/xsum",
    revision: str | None = None,
    document: str = "document",
    summary: str = "summary",
    num_train: int | None = None,
    num_validation: int | None = None,
    num_test: int | None = None,
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

    label = name.rstrip("/").split("/")[-1]
    try:
        splits = datasets.load_dataset(name, revision=revision)
    except (OSError, ValueError, RuntimeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise not_found(label, Path(name), reason=f"Reading it from the hub failed: {lines[0]}") from error
    train, validation, test = (
        _pairs(splits, part, document, summary, name=name) for part in ("train", "validation", "test")
    )
    return summary_corpus(
        label,
        train=train,
        validation=validation,
        test=test,
        num_train=num_train,
        num_validation=num_validation,
        num_test=num_test,
    )


def _pairs(splits: Any, part: str, document: str, summary: str, *, name: str) -> list[DocumentSummary]:
    columns = splits[part].column_names if part in splits else []
    if document not in columns or summary not in columns:
        raise ValueError(
            f"{name} has no {part!r} with the columns {document!r} and {summary!r}, only "
            f"{dict(splits.column_names)}: set data.document and data.summary"
        )
    return list(zip(splits[part][document], splits[part][summary], strict=True))
