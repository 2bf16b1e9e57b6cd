"""Tokens: what is predicted from what, how sentences are padded, that nothing is lost."""

from __future__ import annotations

import pytest
import torch

from curvlab.lab.data import TextCorpus, TokenSplits, pretrained_tokenizer, token_splits, train_tokenizer

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
    with pytest.raises(ValueError, match="but sequences have 16: raise sequence_length"):
        splits.sentences(["the cat " * 20])
    with pytest.raises(ValueError, match="no token to predict"):
        splits.sentences(["the cat", ""])
    with pytest.raises(ValueError, match="at least 260"):
        train_tokenizer(TRAIN, vocabulary_size=100)
    with pytest.raises(ValueError, match=r"yields only \d+ tokens: lower vocabulary_size=5000"):
        train_tokenizer(TRAIN, vocabulary_size=5000)
    with pytest.raises(ValueError, match=r"train text of toy has \d+ tokens, fewer than sequence_length=9999"):
        token_splits(CORPUS, tokenizer, sequence_length=9999)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        token_splits(CORPUS, tokenizer, sequence_length=0)
    from tokenizers import Tokenizer, models

    without_end = Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str()
    with pytest.raises(ValueError, match=r"neither </s> nor <\|endoftext\|>"):
        token_splits(CORPUS, without_end, sequence_length=4)


def test_a_saved_tokenizer_is_loaded_like_one_of_the_hub(tokenizer: str, tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer

    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer), eos_token="</s>")
    fast.save_pretrained(tmp_path)
    loaded = pretrained_tokenizer(str(tmp_path))
    again = token_splits(CORPUS, loaded, sequence_length=16)
    first = token_splits(CORPUS, tokenizer, sequence_length=16)
    assert torch.equal(again.train.tensors[0], first.train.tensors[0])
