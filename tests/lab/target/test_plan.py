"""A dry run: sizes from closed forms, every target planned or refused with a reason, nothing computed."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.lab.target import load_config
from curvlab.lab.target.discovery import all_targets
from curvlab.lab.target.entry import main
from curvlab.lab.target.plan import costs, describe, plan_of
from curvlab.lab.target.plan.costs import Cost
from curvlab.lab.target.plan.products import DECLARED, LANCZOS, hyperparameters
from curvlab.lab.target.plan.sizes import Sizes, UnplannableError, in_bytes, sizes_of
from curvlab.lab.target.tasks import plain_task_settings

MLP = {
    "data": {"_target_": "curvlab.lab.data.load_mnist", "num_train": 500},
    "model": {"_target_": "curvlab.lab.models.MLP", "hidden_sizes": [64], "activation": "tanh"},
}


def test_sizes_of_an_mlp_have_a_closed_form() -> None:
    found = sizes_of(MLP | {"freeze": {"normalization": False, "biases": True}})
    weights = 784 * 64 + 64 * 10
    assert (found.num_parameters, found.total_parameters) == (weights, weights + 74)
    assert found.num_examples == 500
    assert found.flops == 2 * weights
    assert found.activations == 4 * (784 + 64)  # what the two layers read; tanh keeps what the second reads
    vectors = 4 * (found.total_parameters + 3 * weights)
    assert found.peak_bytes(8) == vectors + 8 * 2.65 * found.activations
    assert found.peak_bytes(8, low_memory=True) == vectors + 8 * 1.3 * found.activations


def test_published_language_models_are_known_without_loading_them() -> None:
    target = all_targets()["lissa/tab1"]
    plan = plan_of_sizes(target, "paper")
    sizes = {task.name: task.sizes for task in plan.tasks}
    assert sizes["opt_1b_openwebtext2"].num_parameters == 1_315_758_080
    assert sizes["llama_7b_openwebtext2"].num_parameters == 6_738_415_616
    assert sizes["mistral_7b_openwebtext2"].num_parameters == 7_241_732_096
    text = describe(plan)
    assert "sketch 49.6 GB" in text  # five vectors beside a product; a block of 250 rows would be 1.32 TB
    assert text.count("fits one GPU of 80 GB") == 3
    assert text.count("fits 8 x 80 GB") == 2  # the 7B rows, as their config says
    assert "time: about" in text


def test_the_7b_rows_of_table_3_fit_eight_gpus_and_its_sketches_are_counted() -> None:
    plan = plan_of_sizes(all_targets()["lissa/tab3"], "paper")
    tasks = {task.name: task for task in plan.tasks}
    assert len(tasks) == 5
    llama = tasks["llama_7b_openwebtext2"]
    assert llama.sizes.num_tensors == 32 * 9 + 3
    assert llama.products.full == 32 + LANCZOS + 16 + 200 + 291  # a row of the per-tensor sketch for each tensor
    # 640 GB less parameters, 80 % of it: 18 vectors, products of 7 rows. Dense 200 (1 + 200/7/2), by tensor a row
    # of Φ for each product and for each of 42 groups, gradients 20 sketches of 10 rows.
    drawn = 200 * (1 + 200 / 14) + (291 + 291 / 7) + 200
    assert llama.drawn == pytest.approx(drawn * 6_738_415_616)
    text = describe(plan)
    assert text.count("fits 8 x 80 GB") == 2
    assert "time: about" in text


@cache
def remembered(settings: str) -> Sizes:  # several targets have the same tasks
    return sizes_of(json.loads(settings))


def plan_of_sizes(target, preset):  # without probes: as if every example took a second
    names = ("data", "model", "freeze", "tokenizer", "sequence_length", "curvature_train", "dtype")

    def sizes(settings):
        return remembered(json.dumps({name: settings[name] for name in names if name in settings}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("curvlab.lab.target.plan.sizes_of", sizes)
        patch.setattr("curvlab.lab.target.plan.cost_of", lambda sizes: Cost(1.0, "by assumption"))
        return plan_of(target, load_config(target, [f"preset={preset}"]))


@pytest.mark.parametrize("key", [key for key in all_targets() if key not in DECLARED])
def test_every_target_at_paper_is_planned_or_says_why_not(key: str) -> None:
    plan = plan_of_sizes(all_targets()[key], "paper")
    text = describe(plan)
    assert "more than 8 x 80 GB" not in text
    assert text.startswith(f"{plan.target.make_name} (paper): a plan; nothing is computed")
    for task in plan.tasks:
        assert f"{task.name}: " in text
        assert (task.sizes is None) == bool(task.reason)
        if task.sizes is not None:
            assert task.sizes.peak_bytes(1, low_memory=True) <= task.sizes.peak_bytes(1)
    assert ("alone: about" in text) == (plan.seconds is not None)  # none of these declares its products
    assert plan.seconds is not None or "time: not planned: " in text


def test_time_is_what_is_declared() -> None:
    plan = plan_of_sizes(all_targets()["lissa/tab1"], "smoke")
    cfg = load_config(all_targets()["lissa/tab1"], ["preset=smoke"])
    (task, *_), own = plan.tasks, next(iter(cfg.tasks.values()))
    products = hyperparameters({part: dict(cfg[part]) | dict(own.get(part) or {}) for part in
                                ("spectrum", "forms", "sketch", "constant")}, task.sizes)  # fmt: skip
    assert task.products == products
    assert products.full > LANCZOS + cfg.spectrum.trace_probes
    training = task.epochs * task.sizes.num_examples * 3 / 5
    seconds = products.full * task.sizes.num_examples + products.examples + training
    assert task.seconds == pytest.approx(seconds + task.drawing_seconds)
    assert task.drawing_seconds == pytest.approx(task.drawn / costs.normals_per_second())


def test_products_of_table_3_are_counted_as_a_run_counts_them(run_smoke) -> None:
    """All but Lanczos's, whose number follows from the spectrum: at most as many as there are parameters."""
    record = json.loads((run_smoke("lissa/tab3") / "run.json").read_text(encoding="utf-8"))
    plan = plan_of_sizes(all_targets()["lissa/tab3"], "smoke")
    cfg = load_config(all_targets()["lissa/tab3"], ["preset=smoke"])
    planned = 0.0
    for task, own in zip(plan.tasks, plain_task_settings(cfg).values(), strict=True):
        pairs = own["frobenius"]["num_pairs"]
        planned += task.products.full - LANCZOS + 2 * pairs
    assert 0 < record["num_matvecs"] - planned < 300


def test_the_probe_measures_a_product() -> None:
    """CPU seconds on a machine that may be busy: within a factor of 5 of a product with all examples."""
    sizes = sizes_of(MLP)
    cost = costs.cost_of(sizes)
    assert cost.source == "own network, 256 examples"
    op = GaussNewtonOperator(
        sizes.build(), nn.CrossEntropyLoss(), (torch.randn(500, 1, 28, 28), torch.randint(10, (500,)))
    )
    seconds = min(costs.seconds_of(op) for _ in range(3))
    assert seconds / 5 < 500 * cost.seconds < 5 * seconds


def test_a_network_that_is_too_large_for_a_probe_goes_by_its_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "MOST_FLOPS", 1.0)
    monkeypatch.setattr(costs, "rate", lambda: 1e9)
    sizes = sizes_of(MLP)
    assert costs.cost_of(sizes).seconds == pytest.approx(5 * sizes.flops / 1e9)


def test_plan_on_the_command_line_computes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folders = [f"results.root={tmp_path / 'results'}", f"store.root={tmp_path / 'store'}"]
    monkeypatch.setattr("sys.argv", ["fig3", "preset=smoke", "plan=true", f"hydra.run.dir={tmp_path}", *folders])
    main(all_targets()["ngd/fig3"])
    assert "ngd-fig3 (smoke): a plan; nothing is computed" in capsys.readouterr().out
    assert not (tmp_path / "results").exists()
    assert not (tmp_path / "store").exists()


def test_what_cannot_be_known_says_why() -> None:
    with pytest.raises(UnplannableError, match="names no data and model"):
        sizes_of({"model": None})
    with pytest.raises(UnplannableError, match="data cannot be read"):
        sizes_of(MLP | {"data": {"_target_": "curvlab.lab.data.no_such_loader"}})
    hub = {"tokenizer": {"pretrained": "somebody/model"}, "sequence_length": 4} | MLP
    with pytest.raises(UnplannableError, match="somebody/model are not known without loading it"):
        sizes_of(hub)
    assert in_bytes(1.3157e12) == "1.32 TB"
    assert isinstance(sizes_of(MLP), Sizes)
