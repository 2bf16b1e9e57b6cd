"""Documents and summaries as tokens for encoder-decoder models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvlab.lab.data.summary_corpus import DocumentSummary, SummaryCorpus
from curvlab.lab.data.token_splits import END, IGNORED, PADDING


@dataclass(frozen=True)
class SummarySplits:
    """Token numbers of pairs, as `curvlab.lab.models.EncoderDecoder` reads them.

    Inputs (N, S + T): S tokens of the document, its end </s> included, padded on the right; then T tokens that the
    decoder reads, the summary shifted by one: padding (as T5 begins), then all but its last token. Targets (N, T):
    the summary's tokens with </s> at the end, -100 where there is none.

    Attributes:
        name: of the corpus.
        train: inputs and targets.
        validation: likewise.
        test: likewise.
        test_summaries: of the test pairs, as text, not cut.
        input_shape: (S, T).
        num_outputs: size of the vocabulary.
        padding: number of <pad>.
        end: number of </s>.
        encode: pairs to inputs and targets.
        decode: generated tokens (N, any) to N texts, without what follows </s>.
    """

    name: str
    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    test_summaries: tuple[str, ...]
    input_shape: tuple[int, int]
    num_outputs: int
    padding: int
    end: int
    encode: Callable[[Sequence[DocumentSummary]], tuple[Tensor, Tensor]]
    decode: Callable[[Tensor], list[str]]


def summary_splits(
    corpus: SummaryCorpus, tokenizer: str, *, source_length: int, target_length: int, prefix: str = ""
) -> SummarySplits:
    """Return the pairs as tokens; documents and summaries that are longer are cut.

    Args:
        corpus: pairs.
        tokenizer: from `train_tokenizer` or `pretrained_tokenizer`; has <pad> and </s>, as T5's.
        source_length: S, tokens of a document.
        target_length: T, tokens of a summary.
        prefix: before every document; T5 was trained with "summarize: ".
    """
    from tokenizers import Tokenizer

    if min(source_length, target_length) < 2:
        raise ValueError(
            f"source_length and target_length must be at least 2, a token and </s>, got {source_length} and "
            f"{target_length}"
        )
    encoder = Tokenizer.from_str(tokenizer)
    padding, end = encoder.token_to_id(PADDING), encoder.token_to_id(END)
    if padding is None or end is None:
        raise ValueError(f"the tokenizer lacks {PADDING} or {END}: use one like T5's, or train_tokenizer")

    def encode(pairs: Sequence[DocumentSummary]) -> tuple[Tensor, Tensor]:
        documents = _rows(encoder, [prefix + document for document, _ in pairs], source_length, padding, end)
        summaries = _rows(encoder, [summary for _, summary in pairs], target_length, padding, end)
        shifted = torch.cat([torch.full_like(summaries[:, :1], padding), summaries[:, :-1]], dim=1)
        # After </s>, and only there, the summary is padding.
        ended = (summaries == end).cumsum(1) - (summaries == end).long() > 0
        return torch.cat([documents, shifted], dim=1), summaries.masked_fill(ended, IGNORED)

    def decode(tokens: Tensor) -> list[str]:
        rows = [row[: row.index(end)] if end in row else row for row in tokens.tolist()]
        texts: list[str] = encoder.decode_batch(rows, skip_special_tokens=True)
        return [text.strip() for text in texts]

    return SummarySplits(
        name=corpus.name,
        train=encode(corpus.train),
        validation=encode(corpus.validation),
        test=encode(corpus.test),
        test_summaries=tuple(summary for _, summary in corpus.test),
        input_shape=(source_length, target_length),
        num_outputs=encoder.get_vocab_size(with_added_tokens=True),
        padding=padding,
        end=end,
        encode=encode,
        decode=decode,
    )


def _rows(encoder: Any, texts: Sequence[str], length: int, padding: int, end: int) -> Tensor:
    """Return (N, length) tokens, cut, with </s>, padded."""
    rows = torch.full((len(texts), length), padding)
    for row, encoding in zip(rows, encoder.encode_batch(list(texts), add_special_tokens=False), strict=True):
        tokens = [*encoding.ids[: length - 1], end]
        row[: len(tokens)] = torch.tensor(tokens)
    return rows
