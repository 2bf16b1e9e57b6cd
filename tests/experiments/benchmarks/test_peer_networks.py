"""What peers are given: ConvNet and OPT rebuilt in plain PyTorch, their losses, TRAK's output of an OPT."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from curvlab.influence import per_example_gradients
from curvlab.lab import Computed
from curvlab.lab.models import ConvNet, LeNet5, small_causal_language_model
from experiments.benchmarks.attribution.libraries.networks import build, reached
from experiments.benchmarks.attribution.libraries.token_margins import token_margins
from experiments.benchmarks.attribution.libraries.worker import METHODS, TrainedNetwork
from experiments.benchmarks.attribution.methods import FILTER, PBRF, UNROLLED, _ekfac, _stored
from experiments.benchmarks.attribution.plot import draw

NUM_TRAIN, NUM_TEST, VOCABULARY, TOKENS = 6, 2, 7, 4


def convnet() -> tuple[nn.Module, Tensor, Tensor]:
    model = ConvNet((2, 6, 6), 3, channels=(2, 3), activation="tanh")
    return model, torch.randn(NUM_TRAIN + NUM_TEST, 2, 6, 6), torch.randint(3, (NUM_TRAIN + NUM_TEST,))


def opt(family: Any = "opt") -> tuple[nn.Module, Tensor, Tensor]:
    pytest.importorskip("transformers")
    model = small_causal_language_model(
        input_shape=(TOKENS,), num_outputs=VOCABULARY, family=family, num_layers=1, width=8, num_heads=2
    )
    # Not 1, the padding: its row of the embedding has no gradient in autograd, and one in `curvlab`.
    tokens = torch.randint(2, VOCABULARY, (NUM_TRAIN + NUM_TEST, TOKENS + 1))
    return model, tokens[:, :-1], tokens[:, 1:]


def stored_of(made: tuple[nn.Module, Tensor, Tensor], damping: float = 0.1) -> dict[str, Any]:
    """Return what the benchmark hands a worker."""
    model, inputs, targets = made
    network = SimpleNamespace(
        settings=OmegaConf.create({"model": {"activation": "tanh"}}),
        train=(inputs[:NUM_TRAIN], targets[:NUM_TRAIN]),
        test=(inputs[NUM_TRAIN:], targets[NUM_TRAIN:]),
    )
    return _stored(network, SimpleNamespace(model=model.eval()), damping)  # type: ignore[arg-type]  # all it reads


@pytest.mark.parametrize("make", [convnet, opt])
def test_the_rebuilt_network_scores_like_the_trained_one(
    make: Callable[[], tuple[nn.Module, Tensor, Tensor]],
) -> None:
    torch.manual_seed(0)
    made = make()
    stored = stored_of(made)
    # A weight of its own for every parameter: zeros and ones of a fresh network hide what is exchanged.
    for parameter in made[0].parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    stored["parameters"] = [parameter.detach() for parameter in made[0].parameters()]
    own = TrainedNetwork(stored)
    train, test = own.train, own.test
    reference = made[0](train[0])
    logits = getattr(reference, "logits", reference)
    torch.testing.assert_close(own.model(train[0]), logits.movedim(-1, 1))
    assert own.num_tokens == (TOKENS if make is opt else 1)
    scores, _ = METHODS["gradients"](own, {})
    of_test, of_train = (per_example_gradients(made[0], nn.CrossEntropyLoss(), data) for data in (test, train))
    torch.testing.assert_close(scores, -of_test @ of_train.T, rtol=1e-4, atol=1e-5)


def test_a_weight_of_another_shape_is_refused() -> None:
    stored = stored_of(convnet())
    stored["channels"] = [2, 4, 3]
    with pytest.raises(ValueError, match=r"0\.weight has shape \(4, 2, 3, 3\), its stored weight \(2, 2, 3, 3\)"):
        TrainedNetwork(stored)


def test_networks_that_no_worker_builds_are_refused() -> None:
    lenet = LeNet5((1, 28, 28), 3)
    with pytest.raises(ValueError, match="no LeNet5: set its peers to null"):
        stored_of((lenet, torch.zeros(8, 1, 28, 28), torch.zeros(8).long()))
    with pytest.raises(ValueError, match="no gpt2: set its peers to null"):
        stored_of(opt("gpt2"))


def test_what_layers_of_a_kind_reach() -> None:
    model = build(stored_of(convnet()))
    assert reached(model, nn.Linear, nn.Conv2d) == ""
    assert reached(model, nn.Linear) == "of the Linear layers: 84 of 179 parameters"
    remark = reached(build(stored_of(opt())), nn.Linear)
    # Attention 4 (64 + 8), feed-forward 2·256 + 32 + 8, head 7·8; embedding 0 more, positions 6·8, 3 norms of 16.
    assert remark.startswith("of the Linear layers: 896 of 992 parameters, of the embedding tied to the head")


def test_traks_output_of_a_language_model(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = ModuleType("trak.modelout_functions")
    outputs.AbstractModelOutput = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trak", ModuleType("trak"))
    monkeypatch.setitem(sys.modules, "trak.modelout_functions", outputs)
    torch.manual_seed(0)
    own = TrainedNetwork(stored_of(opt()))
    model, weights = own.model, {name: p.detach() for name, p in own.model.named_parameters()}
    margins, (tokens, targets) = token_margins(), own.train
    right = own.model(tokens).softmax(1).gather(1, targets[:, None])[:, 0].detach()
    each = torch.stack([margins.get_output(model, weights, {}, *pair) for pair in zip(*own.train, strict=True)])
    torch.testing.assert_close(each, (right / (1 - right)).log().mean(1))
    weight = margins.get_out_to_loss_grad(model, weights, {}, own.train)
    torch.testing.assert_close(weight, (1 - right).mean(1, keepdim=True))
    # Of one token the weighted gradient is minus that of the loss.
    gradient = torch.func.grad(margins.get_output, argnums=1)(model, weights, {}, tokens[0, :1], targets[0, :1])
    data = (tokens[:1, :1], targets[:1, :1])
    weight = margins.get_out_to_loss_grad(model, weights, {}, data)[0, 0]
    loss = torch.autograd.grad(own.loss(model(data[0]), data[1]), list(model.parameters()))
    for found, expected in zip(gradient.values(), loss, strict=True):
        torch.testing.assert_close(weight * found, -expected, rtol=1e-4, atol=1e-6)


def test_our_ekfac_factors_the_last_layer_of_a_convnet_where_it_may() -> None:
    torch.manual_seed(0)
    model, inputs, targets = convnet()
    network: Any = SimpleNamespace(
        run=SimpleNamespace(generator=lambda *_: torch.Generator().manual_seed(0)),
        settings=OmegaConf.create({"seed_name": "test"}),
        loss=nn.CrossEntropyLoss(),
        train=(inputs, targets),
        test=(inputs[:1], targets[:1]),
    )
    trained: Any = SimpleNamespace(model=model)
    whole = _ekfac(network, trained, 0.01)
    torch.testing.assert_close(_ekfac(network, trained, 0.01, max_size=28), whole)  # 3·3·3 inputs and the bias
    without = _ekfac(network, trained, 0.01, max_size=27)
    assert torch.corrcoef(torch.cat([whole, without]))[0, 1] < 0.99


def test_the_figure_names_what_failed_and_what_sees_some_layers(computed_of: Callable[..., Computed]) -> None:
    rows = [{"method": name, "status": "done"} for name in (FILTER, UNROLLED, PBRF)]
    rows += [
        {"method": "a EK-FAC", "status": "done", "damping": d, "remark": "of the Linear layers"} for d in (0.1, 1)
    ]
    rows += [{"method": "b EK-FAC", "status": "failed: no sequences", "damping": d} for d in (0.1, 1)]
    table = pd.DataFrame(rows).assign(task="net", run_damping=0.1, gradient_norm=None)
    for name in ("lds", "lds_low", "lds_high", "lds_other", "lds_other_low", "lds_other_high"):
        table[name] = 0.5
    curves, bars = draw(computed_of({"table": table}))["figure.png"].axes
    legend = [text.get_text() for text in curves.get_legend().get_texts()]
    assert "b EK-FAC: failed, see table.csv" in legend
    assert legend.count("a EK-FAC") == 1
    names = [text.get_text() for text in bars.get_yticklabels()]
    assert names == [FILTER, UNROLLED, PBRF, "a EK-FAC (some layers)"]
