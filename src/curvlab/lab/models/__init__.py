"""Networks, built alike from (input_shape, num_outputs), and what is trained in them."""

from curvlab.lab.models.alexnet import AlexNet
from curvlab.lab.models.causal_language_model import (
    pretrained_causal_language_model,
    small_causal_language_model,
)
from curvlab.lab.models.convnet import ConvNet
from curvlab.lab.models.encoder_decoder import (
    EncoderDecoder,
    add_adapters,
    pretrained_encoder_decoder,
    small_t5,
)
from curvlab.lab.models.group_norm import resnet20_group_norm
from curvlab.lab.models.initialization import build_model
from curvlab.lab.models.lenet import LeNet5
from curvlab.lab.models.mlp import MLP
from curvlab.lab.models.resnet20 import ResNet20
from curvlab.lab.models.sigmoid_mlp import SigmoidMLP
from curvlab.lab.models.torchvision_resnet import resnet18, resnet50
from curvlab.lab.models.vgg13 import VGG13

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
    "pretrained_causal_language_model",
    "pretrained_encoder_decoder",
    "resnet18",
    "resnet20_group_norm",
    "resnet50",
    "small_causal_language_model",
    "small_t5",
]
