"""Files of tensors: read back as written, or named as damaged."""

from __future__ import annotations

import os

import pytest
import torch

from curvlab.tensor_file import DamagedFileError, decode, encode

WHOLE = encode({"x": torch.arange(200.0), "names": ["a", None], "n": 3}, "toy-1 key")


def flipped(place: int) -> bytes:
    content = bytearray(WHOLE)
    content[place] ^= 1
    return bytes(content)


def test_what_is_written_is_read() -> None:
    found = decode(WHOLE, "toy-1 key")
    assert torch.equal(found.pop("x"), torch.arange(200.0))
    assert found == {"names": ["a", None], "n": 3}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it does not begin with 'toy-1 key'"),
        (b"PK a zip archive\n", "it does not begin with"),
        (flipped(2), "it does not begin with"),
        (WHOLE.replace(b"toy-1 key", b"toy-1 other"), "it does not begin with"),
        (WHOLE[:-1], "its checksum is wrong"),
        (flipped(-600), "its checksum is wrong"),  # in a tensor, where torch.load would not notice it
        (encode({"run": os.getcwd}, "toy-1 key"), "it does not load: UnpicklingError"),
    ],
)
def test_damage_is_named(content: bytes, reason: str) -> None:
    with pytest.raises(DamagedFileError, match=reason):
        decode(content, "toy-1 key")


def test_a_view_is_kept_without_the_memory_that_it_lies_in() -> None:
    whole = torch.randn(1000, 100)
    views = {"first": whole[:3], "nested": [(whole[:, 2], whole[0])]}
    content = encode(views, "toy-1 key")
    assert len(content) < 4 * (300 + 1000 + 100) + 4000
    found = decode(content, "toy-1 key")
    assert torch.equal(found["first"], whole[:3])
    assert torch.equal(found["nested"][0][0], whole[:, 2])
    assert len(encode({"whole": whole}, "toy-1 key")) > 400_000
