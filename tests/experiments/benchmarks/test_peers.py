"""kronfluence, dattri, TRAK, bergson on small networks against dense results; by CURVLAB_PEERS_PYTHON."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.testing import assert_close

from curvlab.curvature import GaussNewtonOperator
from curvlab.lab.models import ConvNet, small_causal_language_model
from curvlab.linalg import identity
from curvlab.solvers import Ekfac
from experiments.benchmarks.attribution.exactness import pearson
from experiments.benchmarks.attribution.libraries import process
from experiments.benchmarks.attribution.libraries.worker import TrainedNetwork

PYTHON = os.environ.get("CURVLAB_PEERS_PYTHON")
pytestmark = pytest.mark.skipif(not PYTHON, reason="CURVLAB_PEERS_PYTHON is not set")
LIMITS = {"time_limit": 120.0, "memory_limit": 6.0}
LARGE = 1e4  # a damping beside which no curvature counts
NUM_TRAIN, NUM_TEST, VOCABULARY, TOKENS = 120, 3, 6, 4


def convnet() -> dict[str, Any]:
    torch.manual_seed(0)
    model = ConvNet((2, 4, 4), 3, channels=(3, 4), activation="tanh")
    return stored_of(
        model, torch.randn(NUM_TRAIN + NUM_TEST, 2, 4, 4), torch.randint(3, (NUM_TRAIN + NUM_TEST,))
    ) | {"channels": [2, 3, 4], "sizes": [16, 3], "activation": "tanh"}


def opt(family: Literal["opt", "gpt2"] = "opt") -> dict[str, Any]:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = small_causal_language_model(
        input_shape=(TOKENS,), num_outputs=VOCABULARY, family=family, num_layers=1, width=4, num_heads=2
    )
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    tokens = torch.randint(2, VOCABULARY, (NUM_TRAIN + NUM_TEST, TOKENS + 1))  # 1 is the padding
    config: Any = model.config
    return stored_of(model, tokens[:, :-1], tokens[:, 1:]) | {family: config.to_dict()}


def gpt2() -> dict[str, Any]:
    return opt("gpt2")


def stored_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
    return {
        "parameters": [parameter.detach() for parameter in model.parameters()],
        "train_inputs": inputs[:NUM_TRAIN].contiguous(),
        "train_targets": targets[:NUM_TRAIN].contiguous(),
        "test_inputs": inputs[NUM_TRAIN:].contiguous(),
        "test_targets": targets[NUM_TRAIN:].contiguous(),
    }


def measured(stored: dict[str, Any], damping: float = 0.0, **options: Any) -> dict[str, Any]:
    return process.measure(stored | {"damping": damping}, options, peers_python=PYTHON, **LIMITS)


class Linearised:
    """Jacobians of the outputs by some layers' weights, (N, T, V, P), a tied head untied; gradients by them."""

    def __init__(self, stored: dict[str, Any], *kinds: type[nn.Module]) -> None:
        self.network = TrainedNetwork(stored | {"damping": 0.0})
        model = self.network.model
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(copy.deepcopy(module.weight.data))
        self.layers = [name for name, module in model.named_modules() if isinstance(module, kinds)]
        self.weights = {
            f"{layer}.{name}": parameter.detach()
            for layer in self.layers
            for name, parameter in model.get_submodule(layer).named_parameters()
        }

    def gradients(self, which: str) -> Tensor:
        """(N, P), of each example's mean loss over its tokens."""
        jacobian, residuals, _ = self._at(which)
        return torch.einsum("ntv,ntvp->np", residuals, jacobian) / self.network.num_tokens

    def block_scores(self, damping: float) -> Tensor:
        """Return scores with the Gauss-Newton matrix of each layer by itself."""
        jacobian, _, curvature = self._at("train")
        total, start = torch.zeros(NUM_TEST, NUM_TRAIN), 0
        test, points = self.gradients("test"), self.gradients("train")
        for layer in self.layers:
            size = sum(value.numel() for name, value in self.weights.items() if name.startswith(f"{layer}."))
            own = slice(start, start + size)
            rows = jacobian[..., own]
            matrix = torch.einsum("ntvp,ntvw,ntwq->pq", rows, curvature, rows) / rows[..., 0, 0].numel()
            inverse = torch.linalg.inv(matrix.double() + damping * torch.eye(size)).float()
            total -= test[:, own] @ inverse @ points[:, own].T
            start += size
        return total

    def whole_scores(self, damping: float) -> Tensor:
        """Return scores with the Gauss-Newton matrix of all the layers."""
        rows, _, curvature = self._at("train")
        matrix = torch.einsum("ntvp,ntvw,ntwq->pq", rows, curvature, rows) / rows[..., 0, 0].numel()
        inverse = torch.linalg.inv(matrix.double() + damping * torch.eye(len(matrix))).float()
        return -self.gradients("test") @ inverse @ self.gradients("train").T

    def _at(self, which: str) -> tuple[Tensor, Tensor, Tensor]:
        inputs, targets = getattr(self.network, which)
        model, count = self.network.model, len(inputs)

        def outputs(weights: dict[str, Tensor]) -> Tensor:
            found: Tensor = functional_call(model, weights, (inputs,))
            return found.reshape(*found.shape[:2], -1).transpose(1, 2)  # (N, T, V)

        jacobian = torch.cat([block.flatten(3) for block in jacrev(outputs)(self.weights).values()], dim=3)
        p = outputs(self.weights).detach().softmax(2)
        residuals = p - nn.functional.one_hot(targets.reshape(count, -1), p.shape[2])
        return jacobian.detach(), residuals, torch.diag_embed(p) - p[..., None] * p[..., None, :]


def test_kronfluence_on_a_convnet() -> None:
    stored, damping = convnet(), 1e-2
    options = {"library": "kronfluence", "method": "ekfac"}
    own = Linearised(stored, nn.Conv2d, nn.Linear)
    plain = -own.gradients("test") @ own.gradients("train").T
    large = measured(stored, LARGE, **options)
    assert large["status"] == "done"
    assert large["remark"] == ""
    assert_close(large["scores"] * LARGE, plain, rtol=1e-2, atol=1e-3)
    found = measured(stored, damping, **options)["scores"]
    exact = own.block_scores(damping)
    assert pearson(found, exact).min() > pearson(plain, exact).min() + 0.05
    operator = GaussNewtonOperator(own.network.model, own.network.loss, own.network.train) + damping * identity
    inverse, _ = Ekfac().build(operator, generator=torch.Generator().manual_seed(0))
    ours = -(inverse @ own.gradients("test").T.contiguous()).T @ own.gradients("train").T
    assert pearson(found, ours).min() > 0.9


def test_kronfluence_on_an_opt() -> None:
    stored, damping = opt(), 1e-2
    options = {"library": "kronfluence", "method": "ekfac"}
    own = Linearised(stored, nn.Linear)
    plain = -own.gradients("test") @ own.gradients("train").T
    large = measured(stored, LARGE, **options)
    assert large["status"] == "done"
    assert large["remark"].endswith("of the embedding tied to the head what passes the head")
    # In our units: the mean over tokens, the damping that of its matrix.
    assert_close(large["scores"] * LARGE, plain, rtol=1e-2, atol=1e-3)
    found = measured(stored, damping, **options)["scores"]
    exact = own.block_scores(damping)
    assert pearson(found, exact).min() > max(0.8, float(pearson(plain, exact).min()) + 0.05)


@pytest.mark.parametrize("make", [opt, gpt2])
def test_bergson_on_a_language_model(make: Callable[[], dict[str, Any]]) -> None:
    """EK-FAC of the decoder's layers in our units; by its conjugate gradients their whole Gauss-Newton matrix."""
    kind = nn.Linear if make is opt else pytest.importorskip("transformers.pytorch_utils").Conv1D
    stored, damping = make(), 1e-2
    own = Linearised(stored, kind)
    own.layers = [layer for layer in own.layers if "lm_head" not in layer]
    own.weights = {name: value for name, value in own.weights.items() if "lm_head" not in name}
    plain = -own.gradients("test") @ own.gradients("train").T
    large = measured(stored, LARGE, library="bergson")
    assert large["status"] == "done"
    assert large["remark"].startswith(f"of the {kind.__name__} layers, the head left out: ")
    assert_close(large["scores"] * LARGE, plain, rtol=1e-2, atol=1e-3)
    found = measured(stored, damping, library="bergson")["scores"]
    blocks = own.block_scores(damping)
    assert pearson(found, blocks).min() > max(0.8, float(pearson(plain, blocks).min()) + 0.05)
    refined = measured(stored, damping, library="bergson", num_steps=60)["scores"]
    assert_close(refined, own.whole_scores(damping), rtol=1e-2, atol=1e-3)


def test_bergson_on_a_convnet() -> None:
    mlp = measured(convnet(), 1e-2, library="bergson")
    assert mlp["status"].endswith("NotImplementedError: it takes causal language models of transformers alone")


def test_dattri_on_a_convnet_sees_its_linear_layer() -> None:
    stored = convnet()
    own = Linearised(stored, nn.Linear)
    plain = -own.gradients("test") @ own.gradients("train").T
    large = measured(stored, LARGE, library="dattri", method="ekfac", mended=True)
    assert large["remark"] == "of the Linear layers: 51 of 220 parameters"
    assert_close(large["scores"] * LARGE, plain, rtol=1e-2, atol=1e-3)
    found = measured(stored, 1e-2, library="dattri", method="ekfac", mended=True)["scores"]
    exact = own.block_scores(1e-2)
    assert pearson(found, exact).min() > max(0.9, float(pearson(plain, exact).min()))


def test_dattri_cannot_fit_sequences() -> None:
    found = measured(opt(), 1.0, library="dattri", method="ekfac")
    assert found["status"].startswith("failed: NotImplementedError: its EK-FAC takes no sequences")
    assert "'a_prev'" in found["status"]


@pytest.mark.parametrize("make", [convnet, opt])
def test_trak_is_a_ridge_regression_on_gradients(make: Callable[[], dict[str, Any]]) -> None:
    """-q_i f(test) (F Fᵀ + ridge P/K)⁻¹ f(i): f the gradient of log p/(1 - p), q = 1 - p, K random directions.

    The projection of its P parameters keeps inner products to 1/√K.
    """
    stored, ridge, directions = make(), 10.0, 2048
    found = measured(stored, library="traker", proj_dim=directions, lambda_reg=ridge)
    own = TrainedNetwork(stored | {"damping": 0.0})
    weights = {name: parameter.detach() for name, parameter in own.model.named_parameters()}

    def rights(weights: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        p = functional_call(own.model, weights, (inputs,)).softmax(1)
        return p.gather(1, targets[:, None])[:, 0].reshape(len(inputs), -1)  # (N, T)

    def features(which: str) -> Tensor:
        blocks = jacrev(lambda w: torch.logit(rights(w, *getattr(own, which))).mean(1))(weights)
        return torch.cat([block.flatten(1) for block in blocks.values()], dim=1).double()

    points, test = features("train"), features("test")
    size = points.shape[1]
    matrix = points.T @ points + ridge * size / directions * torch.eye(size)
    exact = -test @ torch.linalg.solve(matrix, points.T) * (1 - rights(weights, *own.train)).mean(1)
    unweighted = -test @ points.T
    assert pearson(found["scores"].double(), exact).min() > 0.97
    assert pearson(unweighted, exact).min() < 0.95
