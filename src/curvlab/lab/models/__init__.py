"""Networks, built alike from (input_shape, num_outputs), and what is trained in them."""

# ruff: noqa: F401  (names that others import from here)
from curvlab.lab.models.convolutional import VGG13, AlexNet, ConvNet, LeNet5
from curvlab.lab.models.language_models import (
    EncoderDecoder,
    add_adapters,
    pretrained_causal_language_model,
    pretrained_encoder_decoder,
    small_causal_language_model,
    small_t5,
)
from curvlab.lab.models.mlp import MLP, SigmoidMLP, build_model
from curvlab.lab.models.resnets import (
    ResNet20,
    resnet18,
    resnet20_group_norm,
    resnet20_last_stage,
    resnet50,
    through_resnet20,
)
