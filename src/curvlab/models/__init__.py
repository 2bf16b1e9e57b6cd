"""Networks, built alike from (input_shape, num_outputs), and what is trained in them."""

from curvlab.models.causal_language_model import (
    pretrained_causal_language_model,
    small_causal_language_model,
)
from curvlab.models.convnet import ConvNet
from curvlab.models.freezing import freeze
from curvlab.models.initialization import build_model, seeded_by
from curvlab.models.lenet import LeNet5
from curvlab.models.mlp import MLP
from curvlab.models.resnet20 import ResNet20
from curvlab.models.torchvision_resnet import resnet18, resnet50

__all__ = [
    "MLP",
    "ConvNet",
    "LeNet5",
    "ResNet20",
    "build_model",
    "freeze",
    "pretrained_causal_language_model",
    "resnet18",
    "resnet50",
    "seeded_by",
    "small_causal_language_model",
]
