"""bench-speed and bench-scale end to end at smoke scale, gauges and parts where the answer is known."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.testing import assert_close

from curvlab.lab import Computed
from curvlab.lab.claims import load_claims
from experiments.benchmarks.scale import CG, DOT, EKFAC, METHODS, ROWS
from experiments.benchmarks.speed.models import (
    DIFFERENCES,
    GRADIENT,
    LOW_MEMORY,
    PLAIN_GRADIENT,
    PRODUCT,
    measure,
    repeats_of,
    rounding_errors,
)
from experiments.benchmarks.speed.networks import build_case
from experiments.benchmarks.speed.products import LAST, LOOP, VMAP, part_computations, product_of, ways_of
from experiments.benchmarks.speed.steps import OPTIMIZERS, PARTS, Recorder, part_of
from experiments.shared.gauges import measure_peak, measure_times, searched_once

# --- bench-speed end to end at smoke scale, and its gauges and parts where the answer is known
CPU = torch.device("cpu")
# One layer without a bias: 4 million parameters, 16 MiB, and hardly any activations.
LAYER = {"_target_": "torch.nn.Linear", "in_features": 2048, "out_features": 2048, "bias": False}
LINEAR = {"model": LAYER, "inputs": "images", "shape": [2048], "num_outputs": 2048, "batch_size": 2}
CONVNET = {
    "_target_": "curvlab.lab.models.ConvNet",
    "channels": [3, 4],
    "input_shape": [1, 8, 8],
    "num_outputs": 3,
}
CONVOLUTIONAL = {"model": CONVNET, "inputs": "images", "shape": [1, 8, 8], "num_outputs": 3, "batch_size": 4}


@pytest.fixture(scope="module")
def result(run_smoke) -> Computed:
    return Computed.of(run_smoke("benchmarks/speed"))


def test_all_parts_have_their_figures_and_claims(result: Computed) -> None:
    assert {path.stem for path in result.folder.glob("*.png")} == {"figure", "figure_more"}
    verdicts = {claim.claim.id: claim.verdict for claim in load_claims(result.folder)}
    assert [verdicts[name] for name in ("time", "low-memory-time")] == ["not asked here"] * 2  # seconds
    judged = {f"{claim}-{model}" for claim in ("memory", "low-memory") for model in ("gpt2", "convnext")}
    assert {verdicts[name] for name in judged} == {"out of reach"}  # too small


def test_a_part_runs_alone(run_smoke) -> None:
    folder = run_smoke("benchmarks/speed", "parts=[products]")
    assert set(Computed.of(folder)) == {"products", "product_parts", "product_ways"}
    assert {claim.verdict for claim in load_claims(folder)} == {"out of reach"}


# ------------------------------------------------------------------------------------ products
def test_products_are_over_two_forwards_and_a_gradient(result: Computed) -> None:
    table = result["products"].set_index(["num_vectors", "method"])
    ours = table.xs("curvlab", level="method")
    assert (ours.status == "done").all()
    forward, gradient = (table.loc[(1, unit), "milliseconds"] for unit in ("forward", "gradient"))
    row = table.loc[(1, "curvlab")]
    assert_close(row.to_base, row.milliseconds / (2 * forward + gradient), rtol=1e-4, atol=0.0)
    assert_close(row.to_aim, row.to_base / 1.15, rtol=1e-4, atol=0.0)
    parts = result["product_parts"].set_index("part")
    floor = parts.milliseconds["forward"] + parts.milliseconds["gradient"]
    assert_close(parts.to_base[LOOP], parts.milliseconds[LOOP] / floor, rtol=1e-4, atol=0.0)
    assert parts.convolutions["forward"] == 0  # an MLP has none


@pytest.mark.parametrize("count", [1, 3])
def test_both_libraries_multiply_the_same_matrix(count: int) -> None:
    pytest.importorskip("curvlinops")
    case = [build_case(CONVOLUTIONAL, torch.Generator().manual_seed(0), CPU) for _ in range(2)]
    ours, theirs = (product_of(m, c, count)() for m, c in zip(("curvlab", "curvlinops"), case, strict=True))
    assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_vectors_in_turns_and_through_one_forward_give_the_same_product() -> None:
    parts = part_computations(build_case(CONVOLUTIONAL, torch.Generator().manual_seed(0), CPU), 3)
    assert_close(parts[LOOP](), parts[VMAP](), rtol=1e-4, atol=1e-6)


def test_all_ways_give_the_same_product_and_gradient(result: Computed) -> None:
    case = build_case(CONVOLUTIONAL, torch.Generator().manual_seed(0), CPU)
    found = {way: compute() for way, compute in ways_of(case).items()}
    assert len(found) == 2 * len([way for way in found if LAST in way]) == 6
    for way, value in found.items():
        same_work = "gradient" if "gradient" in way else "forward mode"
        assert_close(value, found[same_work], rtol=1e-4, atol=1e-6)
    table = result["product_ways"].set_index("way")
    assert set(table.index) == {way for way in found if LAST not in way}  # of an MLP
    assert (table.loc[["forward mode", "gradient"], "to_default"] == 1).all()
    assert table.loc["two passes", "to_default"] != 1


def test_methods_take_turns() -> None:
    calls: list[str] = []
    methods = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    times = measure_times(methods, num_rounds=3, device=CPU)
    assert calls == ["a", "b"] * 3
    assert [len(values) for values in times.values()] == [3, 3]


def test_peak_memory_sees_what_is_held_at_once() -> None:
    peak = measure_peak(lambda: torch.ones(2**24), CPU)  # 64 MiB
    if peak != peak:
        pytest.skip("this system does not tell")
    assert 60 < peak < 100


@pytest.mark.parametrize("frozen", [False, True])  # True last: as all tests have it
def test_what_was_there_is_searched_once_and_frozen_no_longer_than_before(frozen: bool) -> None:
    (gc.freeze if frozen else gc.unfreeze)()
    with searched_once():
        assert len(gc.get_objects()) < gc.get_freeze_count() / 10
    assert (gc.get_freeze_count() > 0) == frozen


# ------------------------------------------------------------------------------------ models
def test_memory_of_a_linear_layer_is_what_it_must_be() -> None:
    task = {"settings": LINEAR, "seed": 0, "device": "cpu", "num_threads": 1, "num_rounds": 1, "num_repeats": 2}
    measured = measure(task)
    assert measured["num_parameters"] == 2**22
    assert measured["held"] == 2**24 + 2 * 2048 * 4 + 2 * 8
    counts = {GRADIENT: 2, PLAIN_GRADIENT: 1, PRODUCT: 2, LOW_MEMORY: 2, DIFFERENCES: 1}
    assert {method: len(values) for method, values in measured["rises"].items()} == counts
    own = repeats_of("linear", measured)
    if own.gradient_rise_mib.isna().any():
        pytest.skip("this system does not tell")
    assert own.gradient_mib.between(31.5, 34).all()  # parameters and gradient
    # Parameters, vector, product, and the gradient of the one weight until it is added to the product.
    assert own.product_mib.between(63.5, 66).all()
    assert own.memory_ratio.between(1.9, 2.1).all()


def test_models_are_measured_and_rounded(result: Computed) -> None:
    table, rounding = result["models"], result["model_rounding"]
    assert table.model.tolist() == ["gpt2", "convnext"]
    assert (table.time_to_floor > 0.5).all()
    assert (rounding[rounding.precision == "fp32"].error < 1e-5).all()
    assert rounding[rounding.precision == "bf16"].error.between(1e-4, 0.2).all()


def test_rounding_is_that_of_the_precision() -> None:
    model = LINEAR["model"] | {"in_features": 64, "out_features": 5}  # type: ignore[operator]
    small = LINEAR | {"model": model, "shape": [64], "num_outputs": 5}
    rows = rounding_errors(small, num_vectors=2, generator=torch.Generator().manual_seed(0), device=CPU)
    errors = pd.DataFrame(rows).set_index(["matrix", "precision", "batches"])
    assert (errors.status == "done").all()
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        own = errors.xs(precision, level="precision")
        assert own.error.between(torch.finfo(dtype).eps / 50, 10 * torch.finfo(dtype).eps).all()
    for precision in ("bf16", "fp16"):  # the vectors' and weights' own rounding comes on top
        of_one = errors.loc[("Gauss-Newton", precision, 1)]
        assert of_one.error_converted > 0.5 * of_one.error


@pytest.mark.parametrize(("kind", "shape"), [("sentences", [6]), ("text", [6]), ("summaries", [6, 4])])
def test_batches_hold_what_users_have(kind: str, shape: list[int]) -> None:
    own = LINEAR | {"shape": shape, "num_outputs": 11, "batch_size": 3, "inputs": kind}
    case = build_case(own, torch.Generator().manual_seed(0), CPU)
    inputs: Any = case.inputs
    assert inputs["input_ids"].shape == (3, 6)
    if kind == "sentences":
        assert case.targets.shape == (3,)
    elif kind == "text":  # each token's target is the next one, and the last has none
        assert torch.equal(case.targets[:, :-1], inputs["input_ids"][:, 1:])
        assert (case.targets[:, -1] == -100).all()
    else:  # the decoder reads what it has to write, one behind
        assert torch.equal(inputs["decoder_input_ids"][:, 1:], case.targets[:, :-1])


# ------------------------------------------------------------------------------------ steps


def test_every_optimizer_is_timed_in_every_repeat(result: Computed) -> None:
    table, summary, ranks = (result[name] for name in ("steps", "step_summary", "step_ranks"))
    assert table.groupby("optimizer").repeat.nunique().to_dict() == dict.fromkeys(OPTIMIZERS, 2)
    assert set(table.parameters) == {65 * 64 + 65 * 64 + 65 * 10}
    assert (table.milliseconds > 0).all()
    assert summary[summary.optimizer == "adam"].to_adam.tolist() == [1.0]
    assert ranks.groupby("rank").optimizer.apply(set).to_dict() == {4: set(OPTIMIZERS), 8: set(OPTIMIZERS)}


def test_parts_of_a_step_add_up(result: Computed) -> None:
    parts = result["step_parts"].set_index("part")
    assert parts.index.tolist() == [*PARTS, "all calls", "least", "ngd", "adam"]
    for column in ("calls", "milliseconds"):
        assert parts[column]["all calls"] == pytest.approx(parts[column][list(PARTS)].sum(), rel=1e-4)
    assert 0 < parts.milliseconds["least"] <= parts.milliseconds["all calls"]
    whole = (parts.calling + parts.arithmetic).dropna()
    assert whole.tolist() == pytest.approx(parts.milliseconds[whole.index].tolist(), rel=1e-4)


def test_calls_are_recorded_and_told_apart() -> None:
    x = torch.eye(3)
    with Recorder() as recorder:
        y = torch.mm(x.T, x)
        y.add_(1)
        torch.bmm(x[None].double(), x[None].double())
        torch.linalg.eigh(y)
    kinds = [part_of(call) for call in recorder.calls]
    assert kinds.count("products") == kinds.count("double products") == kinds.count("eigendecompositions") == 1
    assert kinds.count("element by element") == 3  # the sum, and two copies in double precision
    assert kinds.count("views") == 3


# ------------------------------------------------------------------------------------ finite differences
def test_error_against_step_has_its_minimum_between_rounding_and_curvature(result: Computed) -> None:
    table, summary = result["differences"], result["difference_summary"]
    claims = {claim.claim.id: claim.value for claim in load_claims(result.folder)}
    for precision, smallest, largest, default in (("fp32", 1e-5, 1e-1, 1e-3), ("fp64", 1e-7, 1e-2, 1e-6)):
        curve = summary[(summary.precision == precision) & (summary.step > 0)]
        best = curve.loc[curve.relative_error.idxmin()]
        assert smallest < best.step < largest
        assert curve.relative_error.iloc[[0, -1]].min() > 100 * best.relative_error
        own = table[(table.precision == precision) & (table.step == default)].relative_error
        value = claims[f"default-step-{precision}-mlp-3-tanh-digits-200"]
        assert value == pytest.approx(np.exp(np.log(own).mean()), rel=1e-6)


# --- bench-scale end to end at smoke scale: what is measured, what is forecast, and what is not run
def test_every_method_has_a_row_and_says_what_stopped_it(run_smoke) -> None:
    table = Computed.of(run_smoke("benchmarks/scale"))["scale"]
    assert table.groupby("task").method.apply(tuple).tolist() == [METHODS] * 2
    mlp, opt = (own.set_index("method") for _, own in table.groupby("task", sort=False))
    # All rows of the MLP are G itself: one step, and the scores that the others are compared with.
    assert mlp.residual[ROWS] < 1e-4
    assert mlp.agreement[ROWS] == pytest.approx(1)
    assert mlp.status[CG] == "stopped after 4 steps"
    assert opt.status[ROWS].startswith("not run: outputs of shape")
    # Four steps with two queries, and their residuals.
    assert mlp.products[CG] == 10
    own = mlp.loc[CG]
    hours = (own.products * own.product_seconds * 50 + mlp.seconds[DOT] * 50) * 50_000 / 16 / 3600
    assert own.hours == pytest.approx(hours, rel=1e-4)  # of six digits in the table
    assert mlp.products[EKFAC] == 3


def test_vectors_that_do_not_fit_are_not_tried(run_smoke) -> None:
    table = Computed.of(run_smoke("benchmarks/scale", "memory_limit=1e-6", drawn=False))["scale"]
    assert table[table.method == CG].status.str.startswith("not run: vectors of").all()
