"""One door: every function takes every kind of model and of data, or says what to change; see `doors`."""

from __future__ import annotations

import re

import pytest
import torch
from doors import BEGIN, END, FORMS, FUNCTIONS, KINDS, LIBRARY, MODELS, REFUSED, case_of, table
from torch.testing import assert_close

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # few steps: nothing converges
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.mark.parametrize("model", MODELS)
def test_every_function_takes_every_model(model: str) -> None:
    for name, function in FUNCTIONS.items():
        if (model, name) in REFUSED:
            with pytest.raises((ValueError, TypeError), match=re.escape(REFUSED[model, name])):
                function(case_of(model))
        else:
            found = function(case_of(model))
            assert found.numel(), name
            assert bool(torch.isfinite(found).all()), name


# A model of Hugging Face reads its labels itself; in one function of each of the two ways to the data.
OF_HUGGING_FACE = ("top_eigenvalues, hutchinson_trace of GaussNewtonOperator", "train and evaluate, NGD")


def covered(form: str, function: str, kind: str) -> bool:
    """Whether a function reads a kind of data in this form: each pair of them in one of the forms that have it."""
    forms = [name for name, (_, kinds) in FORMS.items() if kind in kinds]
    place = list(FUNCTIONS).index(function) + list(KINDS).index(kind)
    return forms[place % len(forms)] == form


@pytest.mark.parametrize("form", FORMS)
def test_every_function_gives_the_same_for_every_kind_of_data(form: str) -> None:
    model, kinds = FORMS[form]
    pairs = [(name, kind) for name in FUNCTIONS for kind in kinds[1:] if covered(form, name, kind)]
    assert {name for name, _ in pairs} == set(FUNCTIONS)
    assert {kind for _, kind in pairs} == set(kinds[1:])
    check_kinds(model, pairs)


def test_a_model_that_reads_its_labels_gives_the_same_for_every_kind_of_data() -> None:
    _, kinds = FORMS["mapping with labels inside"]
    check_kinds("GPT-2", [(name, kind) for name in OF_HUGGING_FACE for kind in kinds[1:]])


def check_kinds(model: str, pairs: list[tuple[str, str]]) -> None:
    expected = {name: FUNCTIONS[name](case_of(model)) for name, _ in pairs}
    for name, kind in pairs:
        found = FUNCTIONS[name](case_of(model, KINDS[kind]))
        assert_close(
            found, expected[name], rtol=1e-3, atol=1e-5, msg=lambda text, at=(name, kind): f"{at}: {text}"
        )


def test_the_tables_in_the_documents_are_these() -> None:
    text = LIBRARY.read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0].strip() == table(), "run python tests/conformance/doors.py"
