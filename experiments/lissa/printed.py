"""The models of Tables 1 and 3 as the paper prints them."""

from __future__ import annotations

from functools import cache

import pandas as pd

from curvlab.lab import Claim, ClaimResult, PaperNumbers, exact, judge, load_paper_numbers
from experiments.papers import FOLDER

MODELS = ("ResNet-18", "ResNet-50", "OPT", "Llama-1", "Mistral")


@cache
def paper_numbers() -> PaperNumbers:
    """Return the paper's numbers."""
    return load_paper_numbers("lissa", folder=FOLDER)


def judge_printed(claim: Claim, values: pd.Series, *, why: str, smallest: bool = False) -> ClaimResult:
    """Judge the largest (or smallest) of a value that follows from each printed row; `values` by model."""
    name = str(values.idxmin() if smallest else values.idxmax())
    value = float(values[name])
    return judge(claim, value, exact(value, kind=f"{name}, printed"), if_not_reproduced=f"{name}: {why}")
