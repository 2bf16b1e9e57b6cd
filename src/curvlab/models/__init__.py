"""Networks, built alike from (input_shape, num_outputs), and what is trained in them."""

from curvlab.models.alexnet import AlexNet
from curvlab.models.causal_language_model import (
    pretrained_causal_language_model,
    small_causal_language_model,
)
from curvlab.models.convnet import ConvNet
from curvlab.models.encoder_decoder import (
    EncoderDecoder,
    add_adapters,
    pretrained_encoder_decoder,
    small_t5,
)
from curvlab.models.freezing import freeze
from curvlab.models.group_norm import resnet20_group_norm
from curvlab.models.initialization import build_model, seeded_by
from curvlab.models.lenet import LeNet5
from curvlab.models.mlp import MLP
from curvlab.models.parameter_subset import only_parameters
from curvlab.models.resnet20 import ResNet20
from curvlab.models.sigmoid_mlp import SigmoidMLP
from curvlab.models.torchvision_resnet import resnet18, resnet50
from curvlab.models.vgg13 import VGG13

__all__ = [
    "MLP",
    "VGG13",
    "AlexNet",
    "ConvNet",
    "EncoderDecoder",
    "LeNet5",
    "ResNet20",
    "SigmoidMLP",
    "add_adapters",
    "build_model",
    "freeze",
    "only_parameters",
    "pretrained_causal_language_model",
    "pretrained_encoder_decoder",
    "resnet18",
    "resnet20_group_norm",
    "resnet50",
    "seeded_by",
    "small_causal_language_model",
    "small_t5",
]
