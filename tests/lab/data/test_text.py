"""Text and documents with summaries: what is read from files, packages and the hub, and their tokens."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from curvlab.lab.data import (
    DataNotFoundError,
    SummaryCorpus,
    TextCorpus,
    TokenSplits,
    copying_pairs,
    load_documentation,
    load_hub_summaries,
    load_hub_text,
    load_penn_treebank,
    load_shortened_documentation,
    load_xsum,
    pretrained_tokenizer,
    summary_splits,
    token_splits,
    train_tokenizer,
)
from curvlab.lab.data.summaries import FILES
from curvlab.lab.data.text import like_penn_treebank
from tests.refusals import refuses


def test_penn_treebank_is_read_line_by_line(tmp_path: Path, made_up: None) -> None:
    treebank = tmp_path / "ptb"
    treebank.mkdir()
    (treebank / "ptb.train.txt").write_text(" mr. <unk> is chairman of n.v. \n\n rates fell N N \n the end \n")
    (treebank / "ptb.test.txt").write_text(" no it was n't black monday \n")
    corpus = load_penn_treebank(tmp_path)
    assert corpus.name == "ptb"
    assert corpus.train == ("mr. <unk> is chairman of n.v.", "rates fell N N", "the end")
    assert corpus.test == ("no it was n't black monday",)
    fewer = load_penn_treebank(tmp_path, num_train=2)
    assert fewer.train == corpus.train[:2]
    assert fewer.checksum != corpus.checksum
    assert load_penn_treebank(tmp_path).checksum == corpus.checksum
    refuses(r"num_train=4, but data=ptb has 3 examples", load_penn_treebank, tmp_path, num_train=4)
    text = r"data=ptb is not there: .*cannot be downloaded freely"
    refuses(text, load_penn_treebank, treebank, error=DataNotFoundError)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("In 1969, Neil Armstrong walked on the Moon.", "in N neil armstrong walked on the moon"),
        ("It stretches over 21,000 kilometers.", "it stretches over N kilometers"),
        ("Leonardo’s early 16th-century, “Mona Lisa”", "leonardo 's early 16th-century mona lisa"),
        ("They don't; we'll see.", "they do n't we 'll see"),
        ("Mr. Smith of the U.S. paid $5.50 for A&P.", "mr. smith of the u.s. paid $ N for a&p"),
        ("the 46th president", "the 46th president"),
        ("already in the form N N 's", "already in the form N N 's"),
    ],
)
def test_other_text_is_brought_into_the_form_of_the_treebank(text: str, expected: str) -> None:
    assert like_penn_treebank(text) == expected


@pytest.mark.data
def test_the_real_treebank_has_that_form_already(data_root) -> None:
    """What `like_penn_treebank` does to the treebank's own lines is (almost) nothing."""
    lines = load_penn_treebank(data_root("ptb"), num_train=2000, num_test=1).train
    assert len(load_penn_treebank(data_root("ptb")).train) == 42068
    plain = [line for line in lines if "<" not in line and "\\" not in line and "#" not in line]
    same = sum(like_penn_treebank(line) == line for line in plain)
    assert same > 0.9 * len(plain)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "toydocs"
    (folder / "tests").mkdir(parents=True)
    paragraphs = [
        f"Paragraph number {word} says nothing much but says it in ten words." for word in "abcdefghijkl"
    ]
    (folder / "__init__.py").write_text('"""' + "\n\n".join(paragraphs) + '"""\n')
    (folder / "code.py").write_text(
        '"""Too short."""\n\n'
        "def f(x):\n"
        '    """Return the :class:`~toy.Thing` of ``x``, once more in ten words or more of text.\n\n'
        "    Parameters\n    ----------\n    x : int, that is one two three four five six seven eight.\n\n"
        "    >>> f(1) shows how one two three four five six seven eight nine.\n\n"
        f'    {paragraphs[0]}\n    """\n'
    )
    (folder / "broken.py").write_text("def (:\n")
    (folder / "tests" / "test_it.py").write_text(
        '"""' + "Not read at all, since tests are no text to learn from, are they." + '"""'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "toydocs"


def test_documentation_is_the_prose_of_docstrings(package: str) -> None:
    corpus = load_documentation(package=package)
    texts = [*corpus.train, *corpus.test]
    assert len(texts) == 13 == len(set(texts))
    assert corpus.test == ("Paragraph number j says nothing much but says it in ten words.",)  # every tenth
    assert "Return the toy.Thing of x, once more in ten words or more of text." in corpus.train
    assert not any(">>>" in text or "---" in text or "Not read" in text for text in texts)
    few = load_documentation(package=package, num_train=3, num_test=1)
    assert few.train == corpus.train[:3]
    assert package in corpus.name
    refuses("'not_a_package' is not installed", load_documentation, package="not_a_package")


def test_documentation_of_a_real_package_is_english_and_reproducible() -> None:
    corpus = load_documentation(num_train=50, num_test=5)
    assert len(corpus.train) == 50
    assert corpus.checksum == load_documentation(num_train=50, num_test=5).checksum
    assert sum(" the " in text for text in corpus.train) > 20
    assert "sklearn" in sys.modules or corpus.name.startswith("documentation of sklearn")


def test_text_of_the_hub_is_read_as_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "owt"
    write_lines(folder / "part.jsonl", [{"text": f"document {i}"} for i in range(10)])
    corpus = load_hub_text(name=str(folder), num_train=3, num_test=2)
    assert corpus.name == "owt"
    assert corpus.test == ("document 0", "document 1")
    assert corpus.train == ("document 2", "document 3", "document 4")
    refuses("has no column 'body'", load_hub_text, name=str(folder), column="body", num_train=3, num_test=2)
    refuses(r"num_train=9, but data=owt has 8 examples", load_hub_text, name=str(folder), num_train=9, num_test=2)
    with pytest.raises(DataNotFoundError, match=r"data=nothing is not there: .*Reading it from the hub failed"):
        load_hub_text(name=str(tmp_path / "nothing"), num_train=1, num_test=1)


# ------------------------------------------------------------------------------------ summaries
def write_lines(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_staged_xsum_is_split_at_random_but_always_alike(tmp_path: Path, made_up: None) -> None:
    rows = [{"document": f"document\nnumber {index}", "summary": f"summary {index}"} for index in range(340)]
    write_lines(tmp_path / "xsum" / FILES[0], rows[:200])
    write_lines(tmp_path / "xsum" / FILES[1], rows[200:])
    corpus = load_xsum(tmp_path)
    assert [len(part) for part in (corpus.train, corpus.validation, corpus.test)] == [340 - 326, 126, 200]
    everything = {*corpus.train, *corpus.validation, *corpus.test}
    assert everything == {(f"document number {index}", f"summary {index}") for index in range(340)}
    assert any(int(summary.split()[1]) >= 200 for _, summary in corpus.test)
    assert load_xsum(tmp_path) == corpus
    fewer = load_xsum(tmp_path, num_train=2, num_validation=3, num_test=4)
    assert fewer.train == corpus.train[:2]
    assert fewer.test == corpus.test[:4]
    assert fewer.text == tuple(document for document, _ in fewer.train)
    assert fewer.checksum != corpus.checksum
    refuses(r"num_validation=127, but data=xsum has 126 examples", load_xsum, tmp_path, num_validation=127)
    text = r"data=xsum is not there: .*take data=xsum_hub"
    refuses(text, load_xsum, tmp_path / "elsewhere", error=DataNotFoundError)


@pytest.mark.data
def test_the_real_pairs(data_root) -> None:
    corpus = load_xsum(data_root("xsum"))
    assert [len(part) for part in (corpus.train, corpus.validation, corpus.test)] == [1600, 126, 200]
    documents = [document for part in (corpus.train, corpus.validation, corpus.test) for document, _ in part]
    assert len(set(documents)) == 1926


def test_summaries_in_the_layout_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "pairs"
    for part, count in (("train", 3), ("validation", 2), ("test", 2)):
        write_lines(folder / f"{part}.jsonl", [{"article": f"{part} {i}", "title": f"{i}"} for i in range(count)])
    columns = {"document": "article", "summary": "title"}
    corpus = load_hub_summaries(name=str(folder), **columns, num_train=2)
    assert corpus.name == "pairs"
    assert corpus.train == (("train 0", "0"), ("train 1", "1"))
    assert corpus.validation == (("validation 0", "0"), ("validation 1", "1"))
    text = r"has no 'train' with the columns 'text' and 'title', only"
    refuses(text, load_hub_summaries, name=str(folder), document="text", summary="title")
    nothing = str(tmp_path / "nothing")
    refuses(r"Reading it from the hub failed", load_hub_summaries, name=nothing, error=DataNotFoundError)


def test_documentation_is_shortened_by_leaving_out_short_words() -> None:
    corpus = load_shortened_documentation(num_words=6, min_letters=5, num_train=50, num_validation=9, num_test=8)
    assert [len(part) for part in (corpus.train, corpus.validation, corpus.test)] == [50, 9, 8]
    for document, summary in [*corpus.train, *corpus.validation, *corpus.test]:
        words = document.split()
        kept = [word for word in words if sum(c.isalpha() for c in word) >= 5]
        assert len(words) == 6
        assert summary.split() == (kept or words[:1])
    assert not {*corpus.validation} & {*corpus.test}
    assert all(text.startswith(document) for text, (document, _) in zip(corpus.text, corpus.train, strict=True))
    assert any(len(text.split()) > 6 for text in corpus.text)
    none = load_shortened_documentation(min_letters=99, num_train=3, num_validation=1, num_test=1)
    assert all(summary == document.split()[0] for document, summary in none.train)


def test_copying_pairs_begin_their_stretches() -> None:
    pairs = copying_pairs(["a b c d e f g", "h i"], num_words=3, num_copied=2)
    assert pairs == [("a b c", "a b"), ("d e f", "d e"), ("h i", "h i")]
    assert copying_pairs(["a b c d e f g"], num_words=3, num_copied=2, max_stretches=1) == pairs[:1]
    refuses("num_copied must be between 1 and num_words=3, got 4", copying_pairs, [], num_words=3, num_copied=4)


# ---------------------------------------------------------------------------------------------------------- tokens
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
