"""pbrf-fig5 and pbrf-fig6 end to end at smoke scale, and their parts; their claims are in test_judges."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from curvlab.influence import self_influence
from curvlab.influence.retraining import GAPS, LeftOut
from curvlab.lab import ConfigurationError, load_config, task_settings
from curvlab.lab.claims import load_claims
from curvlab.lab.tables import read_table
from curvlab.lab.targets.gather import gather
from curvlab.training import TrainingDivergedError
from experiments.pbrf import fig6
from experiments.pbrf.fig5 import FACTORS, TARGET, levels
from experiments.pbrf.fig6 import INFLUENCE, INSPECTED, METHODS, OF_PBRF, PBRF, PBRF_TOTAL, RANDOM
from tests.refusals import refuses

# --- pbrf-fig5 end to end at smoke scale: levels, divergence, and a sweep
TASK = "mlp_4_diabetes_60"


@pytest.fixture(scope="module")
def smoke(run_smoke) -> Path:
    return run_smoke("pbrf/fig5")


@pytest.fixture(scope="module")
def points(smoke: Path) -> pd.DataFrame:
    return read_table(smoke, "points")


def gaps(points: pd.DataFrame, factor: str, level: float) -> np.ndarray:
    own = points[(points.factor == factor) & (points.level == level)]
    return own.set_index(["group", "gap"]).per_example.unstack().to_numpy()


def test_results_are_complete_and_agree_with_each_other(smoke: Path, points: pd.DataFrame) -> None:
    names = {"table.csv", "points.csv", "networks.csv", "slopes.csv", "figure.png", "claims.json", "run.json"}
    assert {path.name.removesuffix(".bz2") for path in smoke.iterdir()} == {*names, "figure_more.png"}
    assert len(points) == len(FACTORS) * 2 * 2 * (len(GAPS) + 6)  # levels, groups, gaps and 6 distances
    table = read_table(smoke, "table")
    assert len(table) == len(FACTORS) * 2 * (len(GAPS) + 6)
    means = points.groupby(["factor", "level", "gap"]).per_example.mean()
    for row in table.itertuples():
        assert row.mean == pytest.approx(means[row.factor, row.level, row.gap], rel=1e-4)
    np.testing.assert_allclose(points.total, points.per_example * 60**0.5, rtol=1e-4)
    assert (table.residual < 1e-6).all()
    # One factor at a time: the task's own level is the same network in every panel.
    for factor, level in {"depth": 1, "epochs": 10, "damping": 0.001}.items():
        np.testing.assert_array_equal(gaps(points, factor, level), gaps(points, "width", 4))
    assert table.set_index(["factor", "level"]).removed["removed"].drop_duplicates().tolist() == [6, 42]
    assert table[table.factor == "width"].P.drop_duplicates().tolist() == [25, 49]
    assert table[table.factor == "depth"].P.drop_duplicates().tolist() == [49, 69]


def test_the_whole_is_at_most_the_sum_of_its_gaps(points: pd.DataFrame) -> None:
    by_gap = points.pivot_table(index=["factor", "level", "group"], columns="gap", values="per_example")
    parts = by_gap[list(GAPS)]
    assert (by_gap.whole <= parts.sum(axis=1) * (1 + 1e-5)).all()
    assert (by_gap.whole >= (2 * parts.max(axis=1) - parts.sum(axis=1)) * (1 - 1e-5) - 1e-12).all()


def test_one_seed_decides_nothing(smoke: Path) -> None:
    assert {result.verdict for result in load_claims(smoke)} <= {"undecided", "out of reach", "not asked here"}
    slopes = read_table(smoke, "slopes")
    assert set(slopes.direction) == {"undecided"}
    cold_and_warm = slopes[(slopes.factor == "damping") & (slopes.gap == "warm_start")]
    assert cold_and_warm.slope.item() == 0  # neither depends on the damping


def test_what_diverges_is_nan_and_named(run_smoke) -> None:
    folder = run_smoke("pbrf/fig5", "factor=width", "bregman_lr_divisor=1e-100")
    networks, table = read_table(folder, "networks"), read_table(folder, "table")
    assert set(networks.diverged) == {"proximal_bregman, linearised"}
    by_gap = table.groupby("gap")["mean"].agg(lambda values: values.isna().all())
    of_them = ["linearisation", "moved by linearised", "non_convergence", "solver", "solver by LiSSA"]
    assert by_gap[by_gap].index.tolist() == of_them
    verdicts = {result.claim.id: result.verdict for result in load_claims(folder)}
    assert verdicts["small-at-every-level-width-mlp-4-diabetes-60"] == "out of reach"
    assert verdicts["misaligned-with-depth-mlp-4-diabetes-60"] == "out of reach"  # not in this variation


# ------------------------------------------------------------------ factors
def test_a_mistyped_level_is_refused() -> None:
    settings = task_settings(load_config(TARGET, ["preset=smoke"]))[TASK]
    for changed, message in (
        ({"factor": "widht"}, "did you mean 'width'"),
        ({"level": 4}, "level=4 of what"),
        ({"factor": "removed", "level": 10}, "fraction of the training set below 1"),
        ({"factor": "damping", "level": -1}, "positive number"),
    ):
        refuses(message, levels, type(settings)({**settings, **changed}), error=ConfigurationError)
    (level,) = levels(type(settings)({**settings, "factor": "depth", "level": 3}))
    assert level.settings.model.hidden_sizes == [4, 4, 4]


# ------------------------------------------------------------------ a sweep
def test_a_sweep_has_the_tables_and_the_units_of_the_whole(run_smoke, smoke: Path, tmp_path: Path) -> None:
    """One job by the units of the whole, the other computes them again, in another order."""
    factors, whole = {"width": (), "removed": ("force=true",)}, read_table(smoke, "points")
    for factor, how in factors.items():
        folder = run_smoke("pbrf/fig5", f"factor={factor}", *how, drawn=False)
        assert (json.loads((folder / "run.json").read_text())["store"]["misses"] == 0) is not bool(how)
        for name in ("table", "points", "networks", "slopes"):
            expected = read_table(smoke, name)
            expected = expected[expected.factor == factor].reset_index(drop=True)
            pd.testing.assert_frame_equal(read_table(folder, name), expected, check_exact=True, check_dtype=False)
        shutil.copytree(folder, tmp_path / "pbrf" / "fig5" / folder.name)
    assert gather(["pbrf-fig5"], tmp_path) == 0
    gathered = read_table(tmp_path / "pbrf" / "fig5" / "smoke" / "sweep", "points")
    assert (gathered["override factor"] == gathered.factor).all()
    order = ["factor", "level", "group", "gap"]
    expected = whole[whole.factor.isin(factors)].sort_values(order)
    gathered = gathered.sort_values(order)[expected.columns]
    pd.testing.assert_frame_equal(gathered.reset_index(drop=True), expected.reset_index(drop=True))


# --- pbrf-fig6 end to end at smoke scale, its parts against retraining and counting
TASK_OF_FIG6 = "mlp-8-digits-200"


@pytest.fixture(scope="module")
def smoke_of_fig6(run_smoke: Callable[..., Path]) -> Path:
    return run_smoke("pbrf/fig6")


def test_every_method_has_its_curve(smoke_of_fig6: Path) -> None:
    table, seeds, curves = (read_table(smoke_of_fig6, name) for name in ("table", "seeds", "curves"))
    assert table.method.tolist() == list(METHODS)
    assert len(seeds) == 2 * len(METHODS)
    for (method, seed), own in curves.groupby(["method", "seed"]):
        assert own.found.is_monotonic_increasing
        assert own.found.iloc[0] == 0
        assert own.found.iloc[-1] == pytest.approx(1)
        row = seeds[(seeds.method == method) & (seeds.seed == seed)].iloc[0]
        for inspected in INSPECTED:
            (there,) = own[(own.inspected - inspected).abs() < 1e-9].found
            assert row[f"found at {100 * inspected:g} %"] == pytest.approx(there, abs=1e-5)
    means = table.set_index("method")
    # Twenty epochs have learnt digits and few wrong labels: all but the random order find most of them early.
    assert (means.drop([RANDOM, PBRF_TOTAL])["found at 20 %"] > 0.7).all()
    assert means.area[RANDOM] == pytest.approx(0.5, abs=0.15)
    assert means.area.drop(RANDOM).min() > 0.6
    assert (smoke_of_fig6 / "figure.png").is_file()


def test_networks_say_what_was_learnt_and_how_far_the_responses_got(smoke_of_fig6: Path) -> None:
    networks = read_table(smoke_of_fig6, "networks")
    assert (networks.mislabelled == 20).all()
    assert (networks["wrong label loss"] > 2 * networks["train loss"]).all()
    assert (networks["wrong labels predicted"] <= 0.3).all()
    assert (networks["influence residual"] <= 1e-2).all()
    assert networks["PBRF gradient norm, median"].between(0.01, 1).all()
    assert (networks["spearman own"] > 0.9).all()
    # Two seeds decide nothing, and after ten steps the PBRF has hardly begun.
    verdicts = {
        each.claim.id.removesuffix(f"-{TASK_OF_FIG6}"): each.verdict for each in load_claims(smoke_of_fig6)
    }
    assert {name for name, verdict in verdicts.items() if verdict == "out of reach"} == set(OF_PBRF)
    assert set(verdicts.values()) == {"not asked here", "out of reach"}


def test_without_pbrf_and_by_probes_influence_stays_the_same(
    smoke_of_fig6: Path, run_smoke: Callable[..., Path]
) -> None:
    folder = run_smoke("pbrf/fig6", "descent=null", "influence.num_probes=400", "seeds=[0]", drawn=False)
    exact, estimated = (read_table(path, "seeds") for path in (smoke_of_fig6, folder))
    assert PBRF not in estimated.method.tolist()
    both = exact.merge(estimated, on=["task", "method", "seed"]).set_index("method")
    assert both.area_x[INFLUENCE] == pytest.approx(both.area_y[INFLUENCE], abs=0.01)
    assert both.area_x.drop(INFLUENCE).tolist() == pytest.approx(both.area_y.drop(INFLUENCE).tolist(), abs=1e-3)
    verdicts = {result.claim.id.removesuffix(f"-{TASK_OF_FIG6}"): result.verdict for result in load_claims(folder)}
    assert verdicts["pbrf-finds-most"] == verdicts["influence-aligns"] == "out of reach"
    assert verdicts["influence-finds-most"] == "not asked here"


def test_a_task_may_leave_the_pbrf_out() -> None:
    settings = task_settings(load_config(fig6.TARGET, ["preset=laptop"]))
    assert settings["mlp_128_128_mnist_600"].descent.num_steps == 60
    assert settings["mlp_128_128_mnist_6000"].get("descent") is None


# ---------------------------------------------------------------------------- responses of points
class _Task:
    """What `_responses` reads of a task: logistic regression, where the PBRF has one minimum."""

    def __init__(self, **pbrf: float | None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.model = nn.Linear(3, 3).double()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.loss = nn.CrossEntropyLoss()
        inputs = torch.randn(400, 3, generator=generator, dtype=torch.float64)
        self.train_data = (inputs, torch.randint(0, 3, (400,), generator=generator))
        self.num_train = 400
        options = {"num_steps": 400, "lr": 1.0, "momentum": 0.9, "batch_size": None} | pbrf
        self.settings = OmegaConf.create({"damping": 0.1, "descent": options})

    def generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(1)


def test_responses_of_a_convex_problem_are_influences() -> None:
    task, points = _Task(), torch.tensor([3, 0, 17])
    found = fig6._responses(task, points)  # type: ignore[arg-type]  # what it reads of a task
    influence = self_influence(task.model, task.loss, task.train_data, points=points, damping=0.1, rtol=1e-8)
    assert (found["gradient_norm"] < 1e-6).all()
    torch.testing.assert_close(found["own"], influence.own.detach(), rtol=0.05, atol=0)
    torch.testing.assert_close(found["total"], influence.total.detach(), rtol=0.05, atol=1e-4)


def test_batches_are_the_whole_set_or_epochs() -> None:
    assert [len(batch) for batch in fig6._batches(_Task(num_steps=3))] == [400] * 3  # type: ignore[arg-type]
    drawn = fig6._batches(_Task(num_steps=5, batch_size=150))  # type: ignore[arg-type]
    assert [len(batch) for batch in drawn] == [150, 150, 100, 150, 150]
    assert torch.cat(drawn[:3]).sort().values.tolist() == list(range(400))


def test_a_point_that_overflows_is_first_and_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    descend = fig6.proximal_bregman_warm_optimum

    def overflows_at_17(left_out: LeftOut, minimizer):
        if any(17 in group.tolist() for group in left_out.groups):
            raise TrainingDivergedError("overflow")
        return descend(left_out, minimizer)

    task, points = _Task(num_steps=20), torch.tensor([3, 0, 17, 5])
    alone = fig6._responses(task, torch.tensor([3, 0, 5]))  # type: ignore[arg-type]
    monkeypatch.setattr(fig6, "proximal_bregman_warm_optimum", overflows_at_17)
    found = fig6._responses(task, points)  # type: ignore[arg-type]
    assert found["own"].isinf().tolist() == [False, False, True, False]
    torch.testing.assert_close(found["own"][[0, 1, 3]], alone["own"])
