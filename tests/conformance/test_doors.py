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
OF_HUGGING_FACE = ("influence", "train and evaluate, NGD")


@pytest.mark.parametrize(
    ("form", "model", "names"),
    [
        *((form, model, tuple(FUNCTIONS)) for form, (model, _) in FORMS.items()),
        ("mapping with labels inside", "GPT-2", OF_HUGGING_FACE),
    ],
    ids=[*FORMS, "GPT-2"],
)
def test_every_function_gives_the_same_for_every_kind_of_data(
    form: str, model: str, names: tuple[str, ...]
) -> None:
    kinds = FORMS[form][1]
    for name in names:
        function = FUNCTIONS[name]
        expected = function(case_of(model))
        for kind in kinds[1:]:
            found = function(case_of(model, KINDS[kind]))
            assert_close(found, expected, rtol=1e-3, atol=1e-5, msg=lambda text, at=(name, kind): f"{at}: {text}")


def test_the_tables_in_the_documents_are_these() -> None:
    text = LIBRARY.read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0].strip() == table(), "run python tests/conformance/doors.py"
