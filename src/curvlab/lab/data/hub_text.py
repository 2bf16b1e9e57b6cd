"""Text sets of the Hugging Face hub, read as a stream: no more is downloaded than is used."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from curvlab.lab.data.errors import not_found
from curvlab.lab.data.text_corpus import TextCorpus, text_corpus


def load_hub_text(
    root: str | Path | None = None,
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
    label = name.rstrip("/").split("/")[-1]
    try:
        rows = datasets.load_dataset(name, split=split, streaming=True)
        texts = [str(row[column]) for row in islice(rows, num_test + num_train)]
    except KeyError as error:
        raise ValueError(f"{name} has no column {error}: set data.column to the one that holds the text") from None
    except (OSError, ValueError, RuntimeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise not_found(label, Path(name), reason=f"Reading it from the hub failed: {lines[0]}") from error
    return text_corpus(label, texts[num_test:], texts[:num_test], num_train=num_train, num_test=num_test)
