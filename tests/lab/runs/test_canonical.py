from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from curvlab.lab.runs.canonical import digest, plain


def test_digest_is_sha256_of_sorted_compact_json() -> None:
    expected = hashlib.sha256(b'{"a":[1,2.5,"x",null,true],"b":{"c":0.1}}').hexdigest()
    assert digest({"b": {"c": 0.1}, "a": (1, 2.5, "x", None, True)}) == expected


def test_interpolations_are_resolved() -> None:
    cfg = OmegaConf.create({"seed": 3, "copy": "${seed}", "widths": [1, 2]})
    assert plain({"inner": cfg}) == {"inner": {"seed": 3, "copy": 3, "widths": [1, 2]}}


def test_floats_are_exact_and_integers_are_not_floats() -> None:
    keys = [digest({"x": x}) for x in (0.1, 0.1 + 1e-18, np.nextafter(0.1, 1), 1, 1.0, True, "1", -0.0, 0.0)]
    assert keys[0] == keys[1]  # the same double
    assert len(set(keys[1:])) == len(keys) - 1
    assert digest({"x": np.float64(0.1)}) == keys[0]


@pytest.mark.parametrize("value", [torch.zeros(2), np.zeros(2), {1, 2}, object()])
def test_what_has_no_exact_text_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match=r"config\.solver\[1\] is a .*use numbers, strings, lists and mappings"):
        digest({"solver": [0, value]})


def test_keys_must_be_strings() -> None:
    with pytest.raises(TypeError, match=r"config has the key 1; use strings as keys, here '1'"):
        digest({1: 2})
