from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from curvlab.lab.models import MLP, ConvNet, LeNet5, ResNet20, build_model

FACTORIES = [MLP, ConvNet, partial(LeNet5, activation="relu"), ResNet20]


def weights(factory, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    model = build_model(factory, input_shape=(1, 16, 16), num_outputs=3, generator=generator)
    assert not model.training
    return parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("factory", FACTORIES)
def test_weights_follow_from_the_generator_alone(factory) -> None:
    torch.manual_seed(1)
    first, state = weights(factory, 0), torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(weights(factory, 0), first)
    assert not torch.equal(weights(factory, 1), first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_generator_gives_other_weights_the_second_time() -> None:
    generator = torch.Generator().manual_seed(0)
    models = [build_model(MLP, input_shape=(2,), num_outputs=1, generator=generator) for _ in range(2)]
    assert not torch.equal(*(parameters_to_vector(model.parameters()) for model in models))


def test_the_global_state_comes_back_after_an_error() -> None:
    before = torch.get_rng_state()

    def factory(input_shape, num_outputs):
        torch.rand(3)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        build_model(factory, input_shape=(2,), num_outputs=1, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), before)
