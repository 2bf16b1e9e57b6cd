from __future__ import annotations

import pytest

from curvlab.lab.runs.redaction import path_roots, without_paths

CONFIG = {
    "data": {"root": "/home/jane/data sets", "name": "mnist"},
    "results": {"root": "results"},
    "store": {"root": "../../scratch/jane"},
    "cache": {"root": "~jane/cache"},
}


def test_roots_are_named_by_their_group() -> None:
    assert path_roots(CONFIG) == {
        "/home/jane/data sets": "<data root>",
        "../../scratch/jane": "<store root>",
        "~jane/cache": "<cache root>",
    }
    assert without_paths(CONFIG, path_roots(CONFIG)) == {
        "data": {"root": "<data root>", "name": "mnist"},
        "results": {"root": "results"},
        "store": {"root": "<store root>"},
        "cache": {"root": "<cache root>"},
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/jane/data sets/mnist/train", "<data root>/mnist/train"),
        ("/home/jane/data sets2/x", "<path>"),
        ("/mnt/My Disk/x", "<path>"),
        ("../elsewhere", "<path>"),
        ("~/x", "<path>"),
        ("file:///home/jane/x", "<path>"),
        ("python x.py data.file=/home/jane/x.csv seed=1", "python x.py data.file=<path> seed=1"),
        ("a=[/home/jane/x,../y] b", "a=[<path>,<path>] b"),
        ("results/lissa/fig1", "results/lissa/fig1"),
        ("./data", "./data"),
        ("train/test, 1/2 and / or", "train/test, 1/2 and / or"),
        ("https://example.org/x/y", "https://example.org/x/y"),
    ],
)
def test_only_paths_of_the_machine_leave(text: str, expected: str) -> None:
    assert without_paths({"a": [text]}, path_roots(CONFIG)) == {"a": [expected]}


def test_numbers_stay() -> None:
    assert without_paths({"a": [1, 2.5, None, True]}, {}) == {"a": [1, 2.5, None, True]}
