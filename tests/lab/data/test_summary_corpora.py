"""Documents with summaries: XSum as staged and from the hub's layout, documentation, copying; and their tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from curvlab.lab.data import (
    DataNotFoundError,
    SummaryCorpus,
    copying_pairs,
    load_hub_summaries,
    load_shortened_documentation,
    load_xsum,
    summary_splits,
    train_tokenizer,
)
from curvlab.lab.data.xsum import FILES


def write_lines(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    rows = [{"document": f"document\nnumber {index}", "summary": f"summary {index}"} for index in range(340)]
    write_lines(tmp_path / "xsum" / FILES[0], rows[:200])
    write_lines(tmp_path / "xsum" / FILES[1], rows[200:])
    return tmp_path


def test_staged_xsum_is_split_at_random_but_always_alike(staged: Path) -> None:
    corpus = load_xsum(staged)
    assert [len(part) for part in (corpus.train, corpus.validation, corpus.test)] == [340 - 326, 126, 200]
    everything = {*corpus.train, *corpus.validation, *corpus.test}
    assert everything == {(f"document number {index}", f"summary {index}") for index in range(340)}
    assert any(int(summary.split()[1]) >= 200 for _, summary in corpus.test)
    assert load_xsum(staged) == corpus
    fewer = load_xsum(staged, num_train=2, num_validation=3, num_test=4)
    assert fewer.train == corpus.train[:2]
    assert fewer.test == corpus.test[:4]
    assert fewer.text == tuple(document for document, _ in fewer.train)
    assert fewer.checksum != corpus.checksum


def test_errors_of_staged_xsum(staged: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"num_validation=127, but data=xsum has 126 examples"):
        load_xsum(staged, num_validation=127)
    with pytest.raises(DataNotFoundError, match=r"data=xsum is not there: .*take data=xsum_hub"):
        load_xsum(tmp_path / "elsewhere")
    write_lines(staged / "xsum" / FILES[1], [{"text": "no summary"}])
    with pytest.raises(ValueError, match=r"test_extra.jsonl' is damaged \('document'\)"):
        load_xsum(staged)


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
    with pytest.raises(ValueError, match=r"has no 'train' with the columns 'text' and 'title', only"):
        load_hub_summaries(name=str(folder), document="text", summary="title")
    with pytest.raises(DataNotFoundError, match=r"Reading it from the hub failed"):
        load_hub_summaries(name=str(tmp_path / "nothing"))


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
    with pytest.raises(ValueError, match="num_copied must be between 1 and num_words=3, got 4"):
        copying_pairs([], num_words=3, num_copied=4)


# ------------------------------------------------------------------------------------------ tokens
PAIRS = (("ab cd ef", "cd"), ("gh", "gh gh gh gh gh"))
CORPUS = SummaryCorpus("pairs", PAIRS, PAIRS[:1], PAIRS[1:], text=(), checksum="")
TOKENIZER = train_tokenizer([text for pair in PAIRS for text in pair], vocabulary_size=264)


def test_tokens_are_what_an_encoder_decoder_reads() -> None:
    splits = summary_splits(CORPUS, TOKENIZER, source_length=6, target_length=5)
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


def test_a_document_that_is_too_long_is_cut_before_its_end_mark() -> None:
    splits = summary_splits(CORPUS, TOKENIZER, source_length=3, target_length=4)
    whole = summary_splits(CORPUS, TOKENIZER, source_length=20, target_length=4)
    assert splits.train[0][0, :2].tolist() == whole.train[0][0, :2].tolist()
    assert splits.train[0][0, 2] == splits.end


def test_the_prefix_stands_before_every_document() -> None:
    plain = summary_splits(CORPUS, TOKENIZER, source_length=30, target_length=4)
    with_prefix = summary_splits(CORPUS, TOKENIZER, source_length=30, target_length=4, prefix="summarize: ")
    assert plain.decode(with_prefix.train[0][:, :30]) == ["summarize: ab cd ef", "summarize: gh"]


def test_texts_come_back_from_tokens() -> None:
    splits = summary_splits(CORPUS, TOKENIZER, source_length=12, target_length=20)
    targets = splits.train[1]
    assert splits.decode(targets.masked_fill(targets == -100, splits.padding)) == [s for _, s in PAIRS]
    after_the_end = torch.cat([targets[:1, : int((targets[0] != -100).sum())], torch.tensor([[70, 80]])], dim=1)
    assert splits.decode(after_the_end) == ["cd"]


def test_refuses_lengths_and_tokenizers_that_cannot_end_a_text() -> None:
    with pytest.raises(ValueError, match="source_length and target_length must be at least 2"):
        summary_splits(CORPUS, TOKENIZER, source_length=6, target_length=1)
    with pytest.raises(ValueError, match="the tokenizer lacks <pad> or </s>"):
        summary_splits(CORPUS, TOKENIZER.replace("</s>", "<end>"), source_length=6, target_length=4)
