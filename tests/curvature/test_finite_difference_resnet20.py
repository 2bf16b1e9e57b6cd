"""Finite differences against forward mode on the pretrained ResNet-20 and real CIFAR-10 images."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.data import load_cifar10
from curvlab.models import ResNet20, freeze

ROOT = Path(os.environ.get("CURVLAB_DATA", ""))
WEIGHTS = ROOT / "weights" / "resnet20-12fca82f.th"
NUM_IMAGES = 16


@pytest.mark.data
@pytest.mark.skipif(not WEIGHTS.is_file(), reason=f"needs weights/{WEIGHTS.name} and CIFAR-10 under CURVLAB_DATA")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 2e-2)])
def test_finite_differences_on_real_images(dtype: torch.dtype, tolerance: float) -> None:
    images = load_cifar10(ROOT, num_train=NUM_IMAGES, num_test=1).train
    model = ResNet20((3, 32, 32), 10, weights=WEIGHTS).to(dtype).eval()
    freeze(model, normalization=True, biases=True)
    forward = GaussNewtonOperator(model, nn.CrossEntropyLoss(), images)
    finite = GaussNewtonOperator(model, nn.CrossEntropyLoss(), images, jvp="finite_difference")
    vectors = forward.randn(2, torch.Generator().manual_seed(0))
    exact, approximate = forward @ vectors, finite @ vectors
    assert (approximate - exact).norm() < tolerance * exact.norm()
