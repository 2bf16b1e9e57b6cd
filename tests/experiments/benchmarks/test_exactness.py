"""Peers without their libraries: networks that they are given, workers against dense scores and their limits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev
from torch.testing import assert_close

from curvlab.influence import per_example_gradients
from curvlab.lab import Computed
from curvlab.lab.models import ConvNet, LeNet5, small_causal_language_model
from curvlab.lab.tables import read_table
from experiments.benchmarks.attribution.exactness import pearson
from experiments.benchmarks.attribution.libraries import process
from experiments.benchmarks.attribution.libraries.mended import token_margins
from experiments.benchmarks.attribution.libraries.networks import build, reached
from experiments.benchmarks.attribution.libraries.own_matrix import FISHER, GAUSS_NEWTON, HESSIAN
from experiments.benchmarks.attribution.libraries.own_matrix import exact_scores as exact_scores_of
from experiments.benchmarks.attribution.libraries.process import stored_network
from experiments.benchmarks.attribution.libraries.worker import METHODS, TrainedNetwork
from experiments.benchmarks.attribution.methods import FILTER, PBRF, UNROLLED, _ekfac
from experiments.benchmarks.attribution.plot import draw
from tests.refusals import refuses

# --- bench-influence-peers end to end at smoke scale; its workers against dense scores, and their limits
LIMITS = {"peers_python": None, "time_limit": 60.0, "memory_limit": 6.0}


def network(num_train: int = 12) -> dict:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 5), (4,), (3, 4), (3,)]
    return {
        "sizes": [5, 4, 3],
        "parameters": [torch.randn(shape, generator=generator).double() for shape in shapes],
        "train_inputs": torch.randn(num_train, 5, generator=generator).double(),
        "train_targets": torch.randint(3, (num_train,), generator=generator),
        "test_inputs": torch.randn(2, 5, generator=generator).double(),
        "test_targets": torch.tensor([0, 2]),
        "damping": 0.1,
    }


def exact_scores(stored: dict) -> torch.Tensor:
    """-∇l(test)ᵀ (G + damping I)⁻¹ ∇l(train) with a dense G, from Jacobians of the outputs."""
    own = TrainedNetwork(stored)
    shapes = {name: value.detach() for name, value in own.model.named_parameters()}

    def jacobian(inputs: torch.Tensor) -> torch.Tensor:
        blocks = jacrev(lambda parameters: functional_call(own.model, parameters, (inputs,)))(shapes)
        return torch.cat([block.flatten(2) for block in blocks.values()], dim=2)

    def gradient(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        residuals = own.model(inputs).softmax(1) - torch.nn.functional.one_hot(targets, 3)
        return torch.einsum("nc,ncp->np", residuals.detach(), jacobian(inputs))

    inputs, _ = own.train
    outputs = own.model(inputs).detach()
    curvature = torch.stack([hessian(lambda h: torch.logsumexp(h, 0))(row) for row in outputs])
    rows = jacobian(inputs)
    matrix = torch.einsum("ncp,ncd,ndq->pq", rows, curvature, rows) / len(inputs)
    damped = matrix + stored["damping"] * torch.eye(len(matrix)).double()
    return -gradient(*own.test) @ torch.linalg.solve(damped, gradient(*own.train).T)


@pytest.mark.parametrize(
    ("library", "settings", "rtol"),
    [("curvlab", {"rtol": 1e-8}, 1e-5), ("curvlinops", {"options": {"max_iter": 200, "tolerance": 1e-10}}, 1e-3)],
)
def test_solved_scores_equal_dense_ones(library: str, settings: dict, rtol: float) -> None:
    if library == "curvlinops":
        pytest.importorskip("curvlinops")
    stored = network()
    scores, _ = METHODS[library](TrainedNetwork(stored), settings)
    assert_close(scores, exact_scores(stored), rtol=rtol, atol=1e-8)


@pytest.mark.parametrize(
    ("matrix", "dense_up_to", "residual"),
    [(GAUSS_NEWTON, 0, 1e-5), (HESSIAN, 0, 1e-5), (HESSIAN, 100, 1e-12), (FISHER, 0, 1e-5)],
)
def test_exact_scores_of_each_matrix(matrix: str, dense_up_to: int, residual: float) -> None:
    """Against a dense matrix and a dense solve."""
    stored = network() | {"damping": 0.5}
    own = TrainedNetwork(stored)
    loss, (inputs, targets) = torch.nn.CrossEntropyLoss(), own.train
    shapes = {name: value.detach() for name, value in own.model.named_parameters()}
    start = torch.cat([value.flatten() for value in shapes.values()])

    def losses(flat: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pieces = flat.split([value.numel() for value in shapes.values()])
        own_shapes = (piece.view_as(value) for piece, value in zip(pieces, shapes.values(), strict=True))
        outputs = functional_call(own.model, dict(zip(shapes, own_shapes, strict=True)), (x,))
        return torch.nn.functional.cross_entropy(outputs, y, reduction="none")

    rows, tests = jacrev(losses)(start, inputs, targets), jacrev(losses)(start, *own.test)
    dense = {
        HESSIAN: hessian(lambda flat: losses(flat, inputs, targets).mean())(start),
        FISHER: rows.T @ rows / len(rows),
    }
    settings = OmegaConf.create({"hessian_dense": dense_up_to, "hessian_rtol": 1e-8, "hessian_steps": 500})
    found = exact_scores_of(stored, loss, matrix, settings)
    assert found["residual"] < residual
    if matrix == GAUSS_NEWTON:
        expected = exact_scores(stored)
    else:
        expected = -tests @ torch.linalg.solve(dense[matrix] + 0.5 * torch.eye(len(start)).double(), rows.T)
    assert_close(found["scores"], expected, rtol=1e-4, atol=1e-6)


def test_plain_gradients_are_those_of_an_identity() -> None:
    stored = network()
    own = TrainedNetwork(stored)
    scores, _ = METHODS["gradients"](own, {})
    assert_close(scores, exact_scores(stored | {"damping": 1e9}) * 1e9, rtol=1e-6, atol=1e-6)
    assert pearson(scores, exact_scores(stored)).min() < 0.9  # the curvature matters here: see test_target


def test_correlation_is_invariant_to_scale_and_zero_for_constants() -> None:
    scores = torch.tensor([[1.0, 2.0, 4.0], [3.0, 3.0, 3.0], [1.0, -1.0, 0.0]]).double()
    other = torch.tensor([[10.0, 20.0, 40.0], [1.0, 2.0, 3.0], [-1.0, 1.0, 0.0]]).double()
    assert_close(pearson(scores, other), torch.tensor([1.0, 0.0, -1.0]).double())


def test_a_peer_without_its_python_is_not_installed() -> None:
    result = process.measure(network(), {"library": "dattri", "method": "cg"}, **LIMITS)
    assert result == {"status": "not installed"}


def test_a_missing_peers_python_says_how_to_build_it() -> None:
    with pytest.raises(FileNotFoundError, match=r"pip install.*peers"):
        process.measure(network(), {"library": "dattri"}, **{**LIMITS, "peers_python": "/nowhere/python"})


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"time_limit": 0.05}, "over the time limit of 0.05 s"), ({"memory_limit": 1e-3}, "over the memory limit")],
)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="usage is read from /proc")
def test_limits_end_a_worker(limits: dict, reason: str) -> None:
    settings = {"library": "gradients"}
    result = process.measure(network(), settings, **{**LIMITS, **limits})
    assert result["status"].startswith(reason)


def test_a_failing_worker_gives_its_last_line(tmp_path: Path) -> None:
    python = tmp_path / "python"  # that does not get to the worker: what is checked is what becomes of its words
    python.write_text("#!/bin/sh\nprintf 'Traceback:\\n  ...\\nValueError: invalid literal\\n' >&2\nexit 1\n")
    python.chmod(0o755)
    result = process.measure(network(), {"library": "dattri"}, **{**LIMITS, "peers_python": str(python)})
    assert result == {"status": "failed: ValueError: invalid literal"}


def test_a_worker_gives_the_scores_of_its_method_and_what_they_cost() -> None:
    """The one that is started for real and ends: six in the run below would each import torch."""
    result = process.measure(network(), {"library": "curvlab", "rtol": 1e-8, "num_threads": 1}, **LIMITS)
    assert result.pop("status") == "done"
    assert_close(result["scores"], exact_scores(network()).float(), rtol=1e-4, atol=1e-6)
    assert set(result) == {"scores", "remark", "version", "seconds", "cpu_seconds", "peak_bytes"}
    assert 0 < result["cpu_seconds"] < 30
    assert 2**26 < result["peak_bytes"] < 2**33


def test_target(run_smoke: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CURVLAB_PEERS_PYTHON", raising=False)

    def measure_here(network: dict, options: dict, **limits: Any) -> dict[str, Any]:
        if options["library"] not in process.OWN_LIBRARIES:
            return process.measure(network, options, **limits)
        scores, remark = METHODS[options["library"]](TrainedNetwork(network), options)
        made_up = {"cpu_seconds": 1.0, "peak_bytes": 2**30, "version": "1"}
        return {"status": "done", "scores": scores, "remark": remark} | made_up

    monkeypatch.setattr("experiments.benchmarks.attribution.exactness.measure", measure_here)
    folder = run_smoke("benchmarks/attribution", "parts=[libraries]")
    table = read_table(folder, "libraries")
    assert (folder / "figure_more.png").is_file()
    assert table.groupby("damping").method.apply(list).map(len).tolist() == [3, 3]  # 1e-3, and the run's
    by_method = table.set_index("method")
    assert (by_method.status["dattri EK-FAC"] == "not installed").all()
    assert by_method.matrix["dattri EK-FAC"].tolist() == ["empirical Fisher"] * 2
    ours = by_method.loc["curvlab (default)"]
    assert (ours.status == "done").all()
    assert (ours.pearson_worst > 0.99).all()
    assert (ours.pearson_mean == ours.pearson_gauss_newton).all()
    assert (ours.peak_gib == 1).all()
    assert (ours.lds_low <= ours.lds).all()
    assert (ours.lds <= ours.lds_high).all()
    plain = by_method.loc["plain gradients"]  # takes no matrix, and is compared with the Gauss-Newton matrix's
    assert (plain.pearson_mean == plain.pearson_gauss_newton).all()
    assert (plain.pearson_mean < 0.99).all()
    assert (by_method.reference_residual.dropna() < 1e-5).all()


def test_what_no_exact_scores_stand_behind_has_no_agreement(run_smoke: Callable[..., Path]) -> None:
    only = ["libraries.only=[plain gradients]", "libraries.largest_residual=0"]
    table = read_table(run_smoke("benchmarks/attribution", "parts=[libraries]", *only), "libraries")
    assert (table.reference_residual > 0).all()
    assert table.pearson_mean.isna().all()
    assert table.pearson_gauss_newton.notna().all()


# --- What peers are given: ConvNet and OPT rebuilt in plain PyTorch, their losses, TRAK's output of an OPT
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


def stored_of(made: tuple[nn.Module, Tensor, Tensor]) -> dict[str, Any]:
    """Return what the benchmark hands a worker."""
    model, inputs, targets = made
    train, test = ((inputs[part], targets[part]) for part in (slice(NUM_TRAIN), slice(NUM_TRAIN, None)))
    settings = OmegaConf.create({"model": {"activation": "tanh"}})
    return stored_network(model.eval(), settings, train, test) | {"damping": 0.1}


@pytest.mark.parametrize("make", [convnet, opt])
def test_the_rebuilt_network_scores_like_the_trained_one(make) -> None:
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
    refuses(r"0\.weight has shape \(4, 2, 3, 3\), its stored weight \(2, 2, 3, 3\)", TrainedNetwork, stored)


def test_networks_that_no_worker_builds_are_refused() -> None:
    lenet = LeNet5((1, 28, 28), 3)
    with pytest.raises(ValueError, match="no LeNet5: set its peers to null"):
        stored_of((lenet, torch.zeros(8, 1, 28, 28), torch.zeros(8).long()))
    refuses("no llama: set its peers to null", stored_of, opt("llama"))


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
    trained: Any = SimpleNamespace(
        model=model,
        generator=lambda *_: torch.Generator().manual_seed(0),
        loss=nn.CrossEntropyLoss(),
        train=(inputs, targets),
        test=(inputs[:1], targets[:1]),
    )
    whole = _ekfac(trained, 0.01)
    torch.testing.assert_close(_ekfac(trained, 0.01, max_size=28), whole)  # 3·3·3 inputs and the bias
    without = _ekfac(trained, 0.01, max_size=27)
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
    figure = draw(computed_of({"table": table}, {"num_subsets": 3}))["figure.png"]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "b EK-FAC: failed, see table.csv" in legend
    assert legend.count("a EK-FAC") == 1
    names = [text.get_text() for text in figure.axes[1].get_yticklabels()]
    assert names == [FILTER, UNROLLED, PBRF, "a EK-FAC (some layers)"]
