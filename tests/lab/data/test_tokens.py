"""Tokens of texts and of documents with summaries: what is predicted from what, that nothing is lost."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from curvlab.lab.data import (
    SummaryCorpus,
    TextCorpus,
    TokenSplits,
    pretrained_tokenizer,
    summary_splits,
    token_splits,
    train_tokenizer,
)
from tests.refusals import refuses

pytest.importorskip("tokenizers")
TRAIN = tuple(f"the cat number {i} sat on the mat, and the dog did not." for i in range(30))
CORPUS = TextCorpus("toy", TRAIN, TRAIN[:5], checksum="c", prepare=str.lower)


@pytest.fixture(scope="module")
def tokenizer() -> str:
    return train_tokenizer(TRAIN, vocabulary_size=280)


@pytest.fixture(scope="module")
def splits(tokenizer: str) -> TokenSplits:
    return token_splits(CORPUS, tokenizer, sequence_length=16)


def decode(tokenizer: str, ids: list[int]) -> str:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(tokenizer).decode(ids, skip_special_tokens=False)


def test_training_a_tokenizer_is_deterministic_and_learns_words(tokenizer: str) -> None:
    assert train_tokenizer(TRAIN, vocabulary_size=280) == tokenizer
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_str(tokenizer).get_vocab()
    assert len(vocabulary) == 280
    assert [vocabulary[name] for name in ("<s>", "<pad>", "</s>", "<unk>")] == [0, 1, 2, 3]  # OPT's
    assert "Ġthe" in vocabulary


def test_targets_are_the_next_tokens_and_sequences_cover_the_text(splits: TokenSplits, tokenizer: str) -> None:
    inputs, targets = splits.train.tensors
    assert inputs.shape == targets.shape == (len(splits.train), 16)
    stream, following = inputs.flatten(), targets.flatten()
    assert torch.equal(stream[1:], following[:-1])
    assert int(stream[0]) == splits.end == 2
    text = decode(tokenizer, stream.tolist())
    documents = [part.strip() for part in text.split("</s>")]
    assert documents[1:20] == list(TRAIN[:19])
    assert splits.num_outputs == 280 == len(splits.class_names)
    assert splits.input_shape == (16,)


def test_other_text_is_prepared_and_any_byte_can_be_written(splits: TokenSplits, tokenizer: str) -> None:
    assert splits.encode("THE CAT") == splits.encode("the cat")
    assert decode(tokenizer, splits.encode("naïve 你好")).strip() == "naïve 你好"


def test_sentences_are_padded_masked_and_ignored(splits: TokenSplits) -> None:
    texts = ["the cat", "the dog sat on the mat"]
    inputs, targets = splits.sentences(texts)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for row, text in enumerate(texts):
        tokens = splits.encode(text)
        length = len(tokens)
        assert ids[row, :length].tolist() == [splits.end, *tokens[:-1]]
        assert targets[row, :length].tolist() == tokens
        assert (targets[row, length:] == -100).all()
        assert mask[row].tolist() == [1] * length + [0] * (ids.shape[1] - length)
        assert (ids[row, length:] == splits.padding).all()
    assert (mask.sum(1) > 0).all()


def test_errors_say_what_to_change(splits: TokenSplits, tokenizer: str) -> None:
    refuses("but sequences have 16: raise sequence_length", splits.sentences, ["the cat " * 20])
    refuses("no token to predict", splits.sentences, ["the cat", ""])
    refuses("at least 260", train_tokenizer, TRAIN, vocabulary_size=100)
    refuses(r"yields only \d+ tokens: lower vocabulary_size=5000", train_tokenizer, TRAIN, vocabulary_size=5000)
    too_long = r"train text of toy has \d+ tokens, fewer than sequence_length=9999"
    refuses(too_long, token_splits, CORPUS, tokenizer, sequence_length=9999)
    refuses("at least 1, got 0", token_splits, CORPUS, tokenizer, sequence_length=0)
    from tokenizers import Tokenizer, models

    without_end = Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str()
    refuses(r"neither </s> nor <\|endoftext\|>", token_splits, CORPUS, without_end, sequence_length=4)


def test_a_saved_tokenizer_is_loaded_like_one_of_the_hub(tokenizer: str, tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer

    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer), eos_token="</s>")
    fast.save_pretrained(tmp_path)
    loaded = pretrained_tokenizer(str(tmp_path))
    again = token_splits(CORPUS, loaded, sequence_length=16)
    first = token_splits(CORPUS, tokenizer, sequence_length=16)
    assert torch.equal(again.train.tensors[0], first.train.tensors[0])


# ------------------------------------------------------------------------------------ summaries
PAIRS = (("ab cd ef", "cd"), ("gh", "gh gh gh gh gh"))
SUMMARIES = SummaryCorpus("pairs", PAIRS, PAIRS[:1], PAIRS[1:], text=(), checksum="")
TOKENIZER = train_tokenizer([text for pair in PAIRS for text in pair], vocabulary_size=264)


def test_tokens_are_what_an_encoder_decoder_reads() -> None:
    splits = summary_splits(SUMMARIES, TOKENIZER, source_length=6, target_length=5)
    inputs, targets = splits.train
    assert inputs.shape == (2, 11)
    assert targets.shape == (2, 5)
    assert splits.input_shape == (6, 5)
    assert (splits.padding, splits.end) == (1, 2)
    for row, target in zip(inputs, targets, strict=True):
        kept = target != -100
        length = int(kept.sum())
        assert kept[:length].all()
        assert target[length - 1] == splits.end
        assert row[6] == splits.padding  # what T5's decoder begins with
        assert row[7 : 6 + length].tolist() == target[: length - 1].tolist()
        assert (row[7 + length :] == splits.padding).all()
    assert (targets[0] == -100).any()
    assert not (targets[1] == -100).any()  # cut
    assert splits.test_summaries == ("gh gh gh gh gh",)


def test_a_document_has_its_prefix_and_is_cut_before_its_end_mark() -> None:
    splits, whole = (summary_splits(SUMMARIES, TOKENIZER, source_length=n, target_length=4) for n in (3, 30))
    assert splits.train[0][0, :2].tolist() == whole.train[0][0, :2].tolist()
    assert splits.train[0][0, 2] == splits.end
    with_prefix = summary_splits(SUMMARIES, TOKENIZER, source_length=30, target_length=4, prefix="summarize: ")
    assert whole.decode(with_prefix.train[0][:, :30]) == ["summarize: ab cd ef", "summarize: gh"]


def test_texts_come_back_from_tokens() -> None:
    splits = summary_splits(SUMMARIES, TOKENIZER, source_length=12, target_length=20)
    targets = splits.train[1]
    assert splits.decode(targets.masked_fill(targets == -100, splits.padding)) == [s for _, s in PAIRS]
    after_the_end = torch.cat([targets[:1, : int((targets[0] != -100).sum())], torch.tensor([[70, 80]])], dim=1)
    assert splits.decode(after_the_end) == ["cd"]
    split, endless = partial(summary_splits, SUMMARIES, source_length=6), TOKENIZER.replace("</s>", "<end>")
    refuses("source_length and target_length must be at least 2", split, TOKENIZER, target_length=1)
    refuses("the tokenizer lacks <pad> or </s>", split, endless, target_length=4)
