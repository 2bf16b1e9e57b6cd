"""docs/scale.md says what plan=true prints."""

from __future__ import annotations

import pytest

from curvlab.lab.target.discovery import ROOT
from curvlab.lab.target.plan.sizes import in_bytes, sizes_of

PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith(("| facebook/", "| huggyllama/"))]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split()[1])
def test_memory_is_what_a_plan_says(row: str) -> None:
    name, dtype, parameters, flops, activations, one_pass, two_passes = (
        cell.strip() for cell in row.strip("|").split("|")
    )
    settings = {
        "data": {},
        "model": {"name": name, "dtype": dtype, "attention": "eager"},
        "tokenizer": {"pretrained": name},
        "sequence_length": 256,
        "curvature_train": 50,
    }
    sizes = sizes_of(settings)
    assert parameters == f"{sizes.num_parameters:,}"
    assert flops == f"{sizes.flops:.3g} FLOP"
    assert activations == in_bytes(sizes.activations)
    assert one_pass == in_bytes(sizes.peak_bytes(1))
    assert two_passes == in_bytes(sizes.peak_bytes(1, low_memory=True))


def test_both_models_are_on_the_page() -> None:
    assert [row.split()[1] for row in ROWS] == ["facebook/opt-1.3b", "huggyllama/llama-7b"]
