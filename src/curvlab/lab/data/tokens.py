"""Text as token sequences for causal language models, and documents with summaries for encoder-decoders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from curvlab.lab.data.splits import DataSplits
from curvlab.lab.data.summaries import DocumentSummary, SummaryCorpus
from curvlab.lab.data.text import TextCorpus

PADDING, END, UNKNOWN = "<pad>", "</s>", "<unk>"
SPECIAL_TOKENS = ("<s>", PADDING, END, UNKNOWN)  # their places, 0 to 3, are OPT's
IGNORED = -100  # nn.CrossEntropyLoss's ignore_index


@dataclass(frozen=True)
class TokenSplits(DataSplits):
    """Sequences of T tokens and the T tokens that follow them one by one, both (T,) int64.

    `num_outputs` is the size of the vocabulary, `class_names` the vocabulary, `mean` and `std` are empty. No
    target is ignored, so every sequence predicts T tokens.

    Attributes:
        encode: text to token numbers, without special tokens, after the corpus's `prepare`.
    """

    encode: Callable[[str], list[int]]

    def sentences(self, texts: Sequence[str]) -> tuple[dict[str, Tensor], Tensor]:
        """Return texts as one batch for a causal language model, padded on the right: (N, T) each.

        Each begins with the end token </s>, as OPT was trained, so that its first word is predicted too; padding
        is masked and its targets are ignored.
        """
        rows = [[self.end, *self.encode(text)] for text in texts]
        length, longest = self.input_shape[0], max(len(row) for row in rows)
        if longest - 1 > length:
            raise ValueError(
                f"a text has {longest - 1} tokens, but sequences have {length}: raise sequence_length, or cut it"
            )
        if min(len(row) for row in rows) < 2:
            raise ValueError("an empty text has no token to predict: leave it out")
        inputs = torch.full((len(rows), longest - 1), self.padding)
        mask, targets = torch.zeros_like(inputs), torch.full_like(inputs, IGNORED)
        for index, row in enumerate(rows):
            inputs[index, : len(row) - 1] = torch.tensor(row[:-1])
            targets[index, : len(row) - 1] = torch.tensor(row[1:])
            mask[index, : len(row) - 1] = 1
        return {"input_ids": inputs, "attention_mask": mask}, targets

    @property
    def end(self) -> int:
        """Number of the token that ends every document and begins the first."""
        return _number(self.class_names or (), END, "<|endoftext|>")

    @property
    def padding(self) -> int:
        """Number of the token that fills up short texts: any will do, it is masked."""
        return _number(self.class_names or (), PADDING, END, "<|endoftext|>")


def _number(vocabulary: Sequence[str], *names: str) -> int:
    """Return the number of the first of the names that is a token."""
    for name in names:
        if name in vocabulary:
            return vocabulary.index(name)
    raise ValueError(f"the tokenizer has neither {' nor '.join(names)} to end documents with: use another one")


def train_tokenizer(documents: Iterable[str], *, vocabulary_size: int) -> str:
    """Return a byte-level byte-pair encoder with `vocabulary_size` tokens, as the JSON of `tokenizers`.

    As for OPT and GPT-2 (Sennrich et al. 2016; Radford et al. 2019): no text is unknown. The first tokens are
    <s>, <pad>, </s>, <unk>, then the 256 bytes; the rest are the most frequent pairs.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    smallest = len(SPECIAL_TOKENS) + 256
    if vocabulary_size < smallest:
        raise ValueError(f"vocabulary_size must be at least {smallest}, bytes and marks, got {vocabulary_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    if tokenizer.get_vocab_size() != vocabulary_size:
        raise ValueError(
            f"the text yields only {tokenizer.get_vocab_size()} tokens: lower vocabulary_size={vocabulary_size}, "
            "or take more text"
        )
    return str(tokenizer.to_str())


def pretrained_tokenizer(name: str, *, revision: str | None = None) -> str:
    """Return the tokenizer of a model on the hub, or in a local folder, as the JSON of `tokenizers`."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(name, revision=revision, use_fast=True)
    return str(tokenizer.backend_tokenizer.to_str())


def token_splits(corpus: TextCorpus, tokenizer: str, *, sequence_length: int) -> TokenSplits:
    """Cut a corpus into sequences of `sequence_length` tokens across the borders of documents.

    Documents are joined with </s>; what is left over at the end is dropped.

    Args:
        corpus: the text.
        tokenizer: from `train_tokenizer` or `pretrained_tokenizer`.
        sequence_length: T, tokens each sequence predicts.
    """
    from tokenizers import Tokenizer

    if sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, got {sequence_length}")
    encoder = Tokenizer.from_str(tokenizer)
    vocabulary = _vocabulary(encoder)
    end = _number(vocabulary, END, "<|endoftext|>")

    def encode(text: str) -> list[int]:
        return list(encoder.encode(corpus.prepare(text), add_special_tokens=False).ids)

    sets = []
    for part, documents in (("train", corpus.train), ("test", corpus.test)):
        # Documents of a corpus are in its own form already: `prepare` is for other text.
        encodings = encoder.encode_batch(list(documents), add_special_tokens=False)
        stream = torch.tensor([end, *(token for each in encodings for token in (*each.ids, end))])
        count = (len(stream) - 1) // sequence_length
        if count < 1:
            raise ValueError(
                f"the {part} text of {corpus.name} has {len(stream) - 1} tokens, fewer than sequence_length="
                f"{sequence_length}: take more documents (num_{part}) or shorter sequences"
            )
        size = count * sequence_length
        shape = (count, sequence_length)
        sets.append(TensorDataset(stream[:size].reshape(shape), stream[1 : size + 1].reshape(shape)))
    return TokenSplits(
        name=corpus.name,
        train=sets[0],
        test=sets[1],
        input_shape=(sequence_length,),
        num_outputs=len(vocabulary),
        task="classification",
        class_names=vocabulary,
        checksum=corpus.checksum,
        mean=(),
        std=(),
        encode=encode,
    )


def _vocabulary(encoder: Any) -> tuple[str, ...]:
    numbers = encoder.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(numbers.values()) + 1)  # gaps in published vocabularies stay empty
    for token, number in numbers.items():
        tokens[number] = token
    return tuple(tokens)


# ---------------------------------------------------------------------- documents and summaries
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
