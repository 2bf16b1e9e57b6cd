"""The Penn Treebank in the preprocessing of Mikolov: 10,000 lower-case words, numbers N, no punctuation."""

from __future__ import annotations

import re
from pathlib import Path

from curvlab.lab.data.errors import damaged, not_found
from curvlab.lab.data.text_corpus import TextCorpus, text_corpus

UNKNOWN = "<unk>"

_QUOTES = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"'})
_NUMBER = re.compile(r"(?<![\w-])\d[\d,.]*\d(?![\w-])|(?<![\w-])\d(?![\w-])")
_CONTRACTION = re.compile(r"(n't|'s|'re|'ve|'ll|'d|'m)\b")
# A full stop belongs to a word only in abbreviations (mr., u.s.), which are none at the end of a sentence.
_PUNCTUATION = re.compile(r"[^\w\s.$&%'-]|\.(?=\s|$)")
_NOT_ABBREVIATED = re.compile(r"^(mr|mrs|ms|dr|inc|corp|co|st|jr|[a-z](\.[a-z])*)\.$")


def load_penn_treebank(
    root: str | Path, *, num_train: int | None = None, num_test: int | None = None
) -> TextCorpus:
    """Lines of `root/ptb/ptb.{train,test}.txt`: 42,068 and 3,761 sentences of newspaper text.

    The text is licensed, so there is no download: put the two files there.

    Args:
        root: data root.
        num_train: keep the leading lines only.
        num_test: likewise.
    """
    parts = {}
    for part in ("train", "test"):
        path = Path(root) / "ptb" / f"ptb.{part}.txt"
        if not path.is_file():
            raise not_found("ptb", path, reason="The Penn Treebank cannot be downloaded freely")
        parts[part] = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not parts[part]:
            raise damaged(path, "no lines")
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
