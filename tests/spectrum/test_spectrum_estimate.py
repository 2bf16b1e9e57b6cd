import math

import pytest
import torch

from curvlab.spectrum import Estimate


def test_from_samples_is_mean_and_standard_error() -> None:
    estimate = Estimate.from_samples(torch.tensor([1.0, 2.0, 3.0, 6.0]), num_matvecs=8)
    assert estimate.value == 3.0
    assert estimate.stderr == pytest.approx(math.sqrt((4 + 1 + 0 + 9) / 3 / 4))
    assert estimate.num_matvecs == 8


def test_one_sample_has_no_standard_error() -> None:
    estimate = Estimate.from_samples(torch.tensor([1.5]), num_matvecs=1)
    assert estimate.value == 1.5
    assert math.isnan(estimate.stderr)
