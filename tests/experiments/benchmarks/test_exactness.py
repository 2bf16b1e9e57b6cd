"""bench-influence-peers end to end at smoke scale; its workers against dense scores, and their limits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch.func import functional_call, hessian, jacrev
from torch.testing import assert_close

from curvlab.lab.tables import read_table
from experiments.benchmarks.attribution.exactness import pearson
from experiments.benchmarks.attribution.libraries import process
from experiments.benchmarks.attribution.libraries.own_matrix import FISHER, GAUSS_NEWTON, HESSIAN
from experiments.benchmarks.attribution.libraries.own_matrix import exact_scores as exact_scores_of
from experiments.benchmarks.attribution.libraries.worker import METHODS, TrainedNetwork

LIMITS = {"peers_python": None, "time_limit": 60.0, "memory_limit": 6.0}


def network(num_train: int = 12) -> dict:
    generator = torch.Generator().manual_seed(0)
    sizes = [5, 4, 3]
    shapes = [(4, 5), (4,), (3, 4), (3,)]
    return {
        "sizes": sizes,
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
    folder = run_smoke(
        "benchmarks/attribution",
        "parts=[libraries]",
        "libraries.only=[plain gradients]",
        "libraries.largest_residual=0",
    )
    table = read_table(folder, "libraries")
    assert (table.reference_residual > 0).all()
    assert table.pearson_mean.isna().all()
    assert table.pearson_gauss_newton.notna().all()
