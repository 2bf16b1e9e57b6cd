"""Text as token sequences for causal language models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from curvlab.lab.data.splits import DataSplits
from curvlab.lab.data.text_corpus import TextCorpus

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
        return self._number(END, "<|endoftext|>")

    @property
    def padding(self) -> int:
        """Number of the token that fills up short texts: any will do, it is masked."""
        return self._number(PADDING, END, "<|endoftext|>")

    def _number(self, *names: str) -> int:
        vocabulary = self.class_names or ()
        for name in names:
            if name in vocabulary:
                return vocabulary.index(name)
        raise ValueError(f"the vocabulary has none of {', '.join(names)}: use a tokenizer that ends documents")


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
    end = next((vocabulary.index(name) for name in (END, "<|endoftext|>") if name in vocabulary), None)
    if end is None:
        raise ValueError("the tokenizer has neither </s> nor <|endoftext|> to end documents with: use another one")

    def encode(text: str) -> list[int]:
        return list(encoder.encode(corpus.prepare(text), add_special_tokens=False).ids)

    sets = []
    for part, documents in (("train", corpus.train), ("test", corpus.test)):
        stream = torch.tensor([end, *_stream(encoder, documents, end)])
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


def _stream(encoder: Any, documents: Sequence[str], end: int) -> Iterator[int]:
    # Documents of a corpus are in its own form already: `prepare` is for other text.
    for encoding in encoder.encode_batch(list(documents), add_special_tokens=False):
        yield from encoding.ids
        yield end


def _vocabulary(encoder: Any) -> tuple[str, ...]:
    numbers = encoder.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(numbers.values()) + 1)  # gaps in published vocabularies stay empty
    for token, number in numbers.items():
        tokens[number] = token
    return tuple(tokens)
