"""bench-board: retrainings against a loop by hand, committed banks against the published board, how to enter."""

from __future__ import annotations

import copy
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.influence import per_example_gradients
from curvlab.influence.bank import AGAINST, Bank, BankScore, ceiling, lds_of_predictions, load_bank
from curvlab.lab import load_config, tables
from curvlab.lab.runs.record import read_record
from curvlab.training import shuffled_batches
from experiments.benchmarks.attribution import methods
from experiments.benchmarks.attribution.methods import Method
from experiments.benchmarks.board import __main__, score
from experiments.benchmarks.board.banks import bank_of, largest_difference, task_of
from experiments.benchmarks.board.compute import compute as board_compute
from experiments.benchmarks.board.compute import label
from experiments.benchmarks.board.more_scores import bm25, more_scores
from tests.warm import Warm

ROOT = Path(__file__).parents[3]
PUBLISHED = [path.parent for path in sorted((ROOT / "results/benchmarks/board").glob("*/run.json"))]


@pytest.fixture(scope="module")
def folder(run_smoke: Callable[..., Path]) -> Path:
    return run_smoke("benchmarks/board")


def test_the_board_at_smoke_scale(folder: Path) -> None:
    best, differences = (tables.read_table(folder, name) for name in ("best", "differences"))
    assert set(best.against) == set(AGAINST)
    assert (best.lds_low <= best.lds).all()
    assert (best.lds <= best.lds_high).all()
    value = best.set_index(["method", "against"]).lds
    # The derivative of a training is nearly all of its own short retraining, and less of others'.
    assert value["unrolled", "same seed"] > 0.85
    assert value["unrolled", "same seed"] > value["unrolled", "other seeds"]
    with_curvature = value["influence, as many epochs", "standard"]
    assert value["gradient dot product", "standard"] < with_curvature
    assert (
        value["loss of the example", "standard"] < value["nearest inputs", "standard"]
    )  # the same for every query
    assert value["influence, 50 leading directions", "standard"] > 0.7 * with_curvature
    assert ("Bayesian influence", "standard") in value.index
    found = differences.set_index(["question", "against"]).difference["damping", "standard"]
    assert found == pytest.approx(value["influence", "standard"] - with_curvature, abs=1e-5)
    behind = best[best.against == "standard"].set_index("method")
    leader = behind.lds.drop("ceiling").idxmax()
    assert behind["as good as the best"][leader]
    assert behind.behind[leader] == 0
    assert not behind["as good as the best"]["loss of the example"]
    assert behind["stderr over chains"]["Bayesian influence"] > 0
    assert behind["stderr over chains"].notna().sum() == 1
    preconditioned = "influence by CG with EK-FAC"  # the same scores at another price
    assert behind.lds[preconditioned] == pytest.approx(behind.lds["influence at the run's damping"], abs=0.02)
    cost = tables.read_table(folder, "cost").set_index("method")
    assert cost.dampings[["influence", "EK-FAC", "unrolled"]].tolist() == [2, 2, 1]
    assert (cost.trainings / cost["trainings of one damping"]).round(3).equals(cost.dampings.astype(float))
    residuals, fractions = (tables.read_table(folder, name) for name in ("residuals", "fractions"))
    assert residuals.groupby("residual").products.first().is_monotonic_decreasing  # the smaller, the more products
    assert set(fractions.fraction) == {0.25, 0.5}
    for name in ("figure", "figure_more"):
        assert (folder / f"{name}.png").is_file()


def test_a_first_call_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that calls move: 3 s of a first call are loading, 1 s is work; a long first call is not repeated."""
    now, calls = [0.0], []
    monkeypatch.setattr(methods, "work_clock", lambda _: lambda: now[0])

    def method(name: str, first: float, usual: float) -> Method:
        def compute() -> dict[str, Any]:
            now[0] += usual if name in calls else first
            calls.append(name)
            return {"status": "done"}

        return Method(name, None, {}, compute)

    stopwatch = methods.Stopwatch(torch.device("cpu"))
    short, long = method("short", 4.0, 1.0), method("long", 60.0, 57.0)
    assert [stopwatch(m)["seconds"] for m in (short, short, long, long)] == [1.0, 1.0, 60.0, 57.0]
    assert calls == ["short"] * 3 + ["long"] * 2


def test_the_length_of_adam_is_that_of_a_loop() -> None:
    """torch.optim.Adam by itself, whose own state says how far a step goes along its gradient."""
    with task_of("digits-adam") as (_, task):
        place = task.at(1)
        trained, (x, y) = place.trained(1), place.train
        model, rates = copy.deepcopy(place.initial), []
        adam = torch.optim.Adam(model.parameters(), lr=0.003)
        for step, batch in enumerate(place.batches(1), start=1):
            adam.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            adam.step()
            moved = total = 0.0
            for p in model.parameters():
                scale = 0.003 / ((adam.state[p]["exp_avg_sq"] / (1 - 0.999**step)).sqrt() + 1e-8)
                moved += float((scale * p.grad**2).sum())
                total += float((p.grad**2).sum())
            rates.append(moved / total)
        assert trained.length.learning_rates == pytest.approx(rates, rel=1e-2)
        assert trained.length.time == pytest.approx(sum(rates), rel=1e-3)  # no momentum beside Adam's own
        torch.testing.assert_close(trained.model.state_dict(), model.state_dict(), rtol=1e-2, atol=1e-3)
        assert methods.SEGMENTS in [m.name for m in methods.own_scores(trained)]


def test_trak_of_other_networks_is_of_none_that_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def measure(stored: dict[str, Any], own: dict[str, Any], **_: Any) -> dict[str, Any]:
        seen.append((stored, own))
        return {"status": "done", "scores": torch.zeros(1), "cpu_seconds": 1.0}

    monkeypatch.setattr(methods, "measure", measure)
    with task_of("smoke") as (_, task):
        found = {m.name: m for m in methods.peers(task.trained(0))}
        result = found["TRAK, 10 other networks"].compute()
        others = [task.at(seed).trained(seed) for seed in range(2, 12)]  # 0 and 1 are scored
        for parameters, other in zip(seen[-1][0]["ensemble"], others, strict=True):
            torch.testing.assert_close(parameters, [p.detach() for p in other.model.parameters()])
        assert result["cpu_seconds"] == pytest.approx(1 + sum(other.seconds for other in others))
        asked = {name: method.key["options"] for name, method in found.items()}
        assert asked["TRAK, 2,048 projections"]["proj_dim"] == 2048
        assert asked["kronfluence EK-FAC as shipped"]["own_damping"]
        found["TRAK"].compute()
        assert "ensemble" not in seen[-1][0]


def test_scores_without_gradients_and_of_few_directions() -> None:
    """Against loops by hand, and a dense eigendecomposition."""
    with task_of("smoke") as (_, task):
        place, trained = task.at(0), task.at(0).trained(0)
        asked = [m for m in more_scores(trained) if m.name != "Bayesian influence"]
        found = {m.name: m.compute()["scores"] for m in asked}
        (x, y), (queries, targets) = place.train, place.test
        first, second = trained.model, [m for m in trained.model.modules() if isinstance(m, nn.Linear)]
        alike = (targets[:, None] == y).double()
        alike = alike - alike.mean(1, keepdim=True)
        torch.testing.assert_close(found["same label"], -alike)
        for name, test, train in (
            ("nearest inputs", queries.flatten(1), x.flatten(1)),
            ("nearest activations", *(torch.relu(second[0](z.flatten(1))).detach() for z in (queries, x))),
        ):
            squares = (test.double()[:, None] - train.double()).square().sum(2)
            torch.testing.assert_close(found[name], -(-squares / squares.median()).exp() * alike)
        own = nn.functional.cross_entropy(first(x), y, reduction="none").detach()
        torch.testing.assert_close(found["loss of the example"], -own.expand(len(targets), -1))
        dense = GaussNewtonOperator(trained.model, place.loss, place.train).to_dense()
        values, vectors = torch.linalg.eigh(dense)
        values, vectors = values[-50:], vectors[:, -50:]
        both = (place.test, place.train)
        test, points = (per_example_gradients(trained.model, place.loss, data) @ vectors for data in both)
        expected = -(test / (values + trained.training.length().damping)) @ points.T
        gap = float((found["influence, 50 leading directions"] - expected).norm() / expected.norm())
        assert gap < 0.02


def test_texts_get_bm25_in_place_of_labels() -> None:
    """Against a loop by hand; rare tokens that a document repeats count most, and no label is looked for."""
    generator = torch.Generator().manual_seed(3)
    train, test = (torch.randint(0, 9, (size, 6), generator=generator) for size in (20, 4))
    expected = torch.zeros(4, 20, dtype=torch.float64)
    for q, query in enumerate(test.tolist()):
        for d, document in enumerate(train.tolist()):
            for token in query:
                having = sum(token in other for other in train.tolist())
                rarity = np.log((20 - having + 0.5) / (having + 0.5) + 1)
                expected[q, d] += rarity * 2.2 * document.count(token) / (document.count(token) + 1.2)
    torch.testing.assert_close(bm25(test, train), expected)
    text = SimpleNamespace(train=(train, train), test=(test, test), settings={"chains": None})
    rows = {m.name: m for m in more_scores(text)}  # type: ignore[arg-type]  # what the names need
    assert list(rows) == ["BM25", "loss of the example", "influence, 50 leading directions"]
    torch.testing.assert_close(rows["BM25"].compute()["scores"], -expected)


def test_networks_on_subsets_alone_are_those_of_a_loop() -> None:
    """Each by itself: plain SGD with momentum on its own half, in its own order, from its own start."""
    with task_of("smoke") as (run, task):
        halves = torch.rand(3, task.num_train, generator=torch.Generator().manual_seed(5)).argsort(1) < 100
        found = task.losses_alone(halves, 7)["losses"]
        generator = run.generator("alone", task.settings.seed_name, 7)
        members = [half.nonzero().flatten()[torch.randperm(100, generator=generator)] for half in halves]
        training = task.settings.training
        batches = shuffled_batches(
            100, batch_size=training.batch_size, num_epochs=training.num_epochs, generator=generator
        )
        assert len(batches) == training.num_epochs * 100 // training.batch_size
        (x, y), (queries, targets) = task.train, task.test
        for k, own in enumerate(members):
            start = list(task._start("alone", 7, k).parameters())
            w1, b1, w2, b2 = (p.detach().clone().requires_grad_() for p in start)
            moved = [torch.zeros_like(p) for p in (w1, b1, w2, b2)]

            def forward(inputs: torch.Tensor, p: list[torch.Tensor]) -> torch.Tensor:
                return torch.relu(inputs.flatten(1) @ p[0].T + p[1]) @ p[2].T + p[3]

            parameters = [w1, b1, w2, b2]
            for batch in batches:
                chosen = own[batch]
                loss = nn.functional.cross_entropy(forward(x[chosen], parameters), y[chosen])
                with torch.no_grad():
                    for p, v, g in zip(parameters, moved, torch.autograd.grad(loss, parameters), strict=True):
                        v.mul_(training.momentum).add_(g)
                        p.sub_(training.lr * v)
            expected = nn.functional.cross_entropy(forward(queries, parameters), targets, reduction="none")
            torch.testing.assert_close(found[k], expected.detach(), rtol=1e-4, atol=1e-5)


def test_a_bank_has_starts_and_orders_of_its_own() -> None:
    with task_of("smoke") as (_, task):
        bank, again = (bank_of(task) for _ in range(2))
        assert largest_difference(bank, again) == 0
        assert bank.single_run.shape == (2, 12, 5)
        assert bank.standard.shape == (2, 12, 5)
        for losses in (bank.single_run, bank.standard):
            assert np.abs(losses[0] - losses[1]).min() > 0
        first = [next(task.at(k).initial.parameters()) for k in (0, 1)]
        assert not torch.equal(*first)
        assert not torch.equal(task.batches(0)[0], task.batches(1)[0])


# ---------------------------------------------------------------------------------- published
def banks_by_task() -> dict[str, Bank]:
    banks = [load_bank(path) for path in sorted((ROOT / "results/banks").glob("*.npz"))]
    return {bank.recipe["task"]: bank for bank in banks}


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: folder.name)
def test_the_committed_banks_give_every_number_of_the_board(folder: Path) -> None:
    """From the bank and the ranks of each method's predictions alone, to the last digit that is printed."""
    banks, known = banks_by_task(), tables.names(folder)
    read = {name: tables.read_table(folder, name) for name in known}

    def same(found: BankScore, row: pd.Series, name: str = "lds") -> None:
        for value, end in ((found.value, ""), (found.low, "_low"), (found.high, "_high")):
            assert row[name + end] == pytest.approx(value, rel=5.01e-6, abs=1e-9), row.to_dict()  # six digits

    for task, best in read["best"].groupby("task"):
        bank, own = banks[str(task)], {name: table[table.task == task] for name, table in read.items()}
        own["table"] = own["table"][own["table"].status == "done"]
        found: dict[tuple[str, str], BankScore] = {}  # the best of a method is one of its rows in the table
        for _, row in pd.concat([best, own["table"]]).iterrows():
            name = "ceiling" if row.method == "ceiling" else label(row.method, row.damping)
            if (name, row.against) not in found:
                found[name, row.against] = (
                    ceiling(bank, against=row.against)
                    if name == "ceiling"
                    else lds_of_predictions([score.published(own["ranks"], bank, name)], bank, against=row.against)
                )
            same(found[name, row.against], row)
        rows = best.set_index(["method", "against"], drop=False)
        for _, row in own["differences"].iterrows():
            both = [rows.loc[(method, row.against)] for method in (row["first"], row["second"])]
            pair = [score.published(own["ranks"], bank, label(each.method, each.damping)) for each in both]
            same(lds_of_predictions(pair, bank, against=row.against), row, "difference")
        for _, row in own["residuals"].iterrows() if "residuals" in own else ():
            placed = score.published(own["residual_ranks"], bank, f"{row.residual:g}")
            same(lds_of_predictions([placed], bank, against=row.against), row)
        for _, row in own["fractions"].iterrows() if "fractions" in own else ():
            ranks = own["fraction_ranks"]
            ranks = ranks[ranks.fraction == row.fraction]
            single, standard = (score.published(ranks, bank, f"measured, {a}") for a in ("same seed", "standard"))
            judges = replace(bank, single_run=single, standard=standard[:1])  # type: ignore[arg-type]
            placed = score.published(ranks, bank, row.scores)
            same(lds_of_predictions([placed], judges, against=row.against), row)


@pytest.mark.skipif(not PUBLISHED, reason="no board is published")
def test_a_task_is_added_to_a_published_board(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other tasks' tables stay to the byte, and run.json has their units beside the new one's."""
    folder = tmp_path / "benchmarks/board/laptop"
    shutil.copytree(ROOT / "results/benchmarks/board/laptop", folder)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(__main__, "load_config", lambda target, words: load_config(
        target, [*words, f"results.root={tmp_path}", f"store.root={tmp_path / 'store'}"]
    ))  # fmt: skip
    before, record = {p.name: p.read_bytes() for p in folder.glob("*.csv*")}, read_record(folder)
    best = tables.read_table(folder, "best")
    rows = pd.DataFrame({"task": ["new"], "lds": [0.5]})

    def compute(run: Any, cfg: Any, published: Any, names: Any) -> dict[str, pd.DataFrame]:
        found = board_compute(run, cfg, published, ())
        unit = run.unit("x", {}, lambda: {"value": 1}, version=1)
        return found | ({"residuals": rows} if unit["value"] and names else {})

    monkeypatch.setattr(__main__, "compute", compute)
    monkeypatch.setattr(__main__, "draw_target", lambda *_: None)
    with pytest.raises(SystemExit, match="error: digits: no task of preset=laptop, which has mnist, "):
        __main__.main(["add", "laptop", "mnist", "digits"])
    monkeypatch.setattr(__main__, "judge_target", lambda *_: None)
    __main__.main(["add", "laptop", "mnist"])
    after = {p.name: p.read_bytes() for p in folder.glob("*.csv*")}
    assert after.pop("residuals.csv") == b"task,lds\nnew,0.5\n"
    assert {name: after[name] for name in before if "best" not in name} == {
        name: content for name, content in before.items() if "best" not in name
    }
    assert set(after) == set(before)
    left = tables.read_table(folder, "best")  # with what the config says of its grids
    pd.testing.assert_frame_equal(left.drop(columns="edge"), best.drop(columns="edge", errors="ignore"))
    own = read_record(folder)
    assert own["units"][:-1] == record["units"]
    assert own["units"][-1]["name"] == "x"
    assert own["num_units"] == record["num_units"] + 1
    assert own["data"] == record["data"]


def test_what_a_published_task_lacks_is_computed_beside_its_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EK-FAC is not there, influence at one damping of two; the rest are ranks. The tables are a whole run's."""
    called: list[Method] = []
    whole = {name: tables.read_table(folder, name) for name in tables.names(folder)}
    lacking = {
        name: rows.drop(columns=[place for place in rows if str(place).startswith("EK-FAC @")])
        for name, rows in whole.items()
    }
    for name, rows in lacking.items():
        lacking[name] = rows[rows.method != "EK-FAC"] if "method" in rows else rows
    cost = lacking["cost"]
    lacking["cost"] = cost.assign(dampings=cost.dampings.where(cost.method != "influence", 1))
    board = sys.modules[board_compute.__module__]._Board
    unit = board._unit
    monkeypatch.setattr(board, "_unit", lambda self, place, m: called.append(m) or unit(self, place, m))
    with task_of("smoke") as (run, _):
        found = board_compute(run, run.cfg, lacking, ["smoke"])
    missing = set(whole["table"][whole["table"].status != "done"].method)  # peers, where there are none
    assert {m.name for m in called} - missing == {"influence", "EK-FAC"}
    for name in ("best", "table", "differences"):
        own, read = (rows[name].drop(columns="edge", errors="ignore") for rows in (found, whole))
        pd.testing.assert_frame_equal(own, read, check_dtype=False, rtol=1e-5, atol=1e-6)
    assert found["best"].edge.fillna("").tolist() == whole["best"].edge.fillna("").tolist()
    kept = cost[cost.method.isin(whole["best"].method) & (cost.method != "influence")].set_index("method")
    assert len(kept) > 10  # not what the bank took, which is computed anew at this scale
    assert found["cost"].set_index("method").loc[kept.index, "seconds"].equals(kept.seconds)
    assert set(found["best"][found["best"].method == "EK-FAC"].edge) <= {"lowest", "highest"}
    assert found["best"][found["best"].method == "unrolled"].edge.isna().all()


@pytest.mark.skipif(not PUBLISHED, reason="no board is published")
def test_how_to_enter_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/enter.md").read_text(), flags=re.DOTALL)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CURVLAB_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(score, "OUTPUT", tmp_path)
    (tmp_path / "enter.py").write_text(block.replace("mine.npy", str(tmp_path / "mine.npy")))
    runpy.run_path(str(tmp_path / "enter.py"))
    capsys.readouterr()
    score.judge_file("digits", str(tmp_path / "mine.npy"))
    printed = capsys.readouterr().out
    assert (tmp_path / "digits.png").is_file()
    lines = {line.partition("  ")[0]: line for line in printed.splitlines()}
    # Scores of the networks that the recipe trains again stand beside those of the board.
    printed_of = [re.findall(r"(-?\d\.\d+) \(", lines[name]) for name in ("yours", "gradient dot product")]
    yours, board = ([float(value) for value in own] for own in printed_of)
    assert len(yours) == 3
    assert yours == pytest.approx(board, abs=2e-3)
    # Beside the best, paired; and a sign that is turned round is told.
    best = tables.read_table(PUBLISHED[0], "best").query("task == 'mlp-32-tanh-digits-1000'")
    leader = best[best.against == "standard"].query("method != 'ceiling'").lds.max()
    (paired,) = re.findall(r"^standard: yours less .*, the best: (.\d\.\d+) \(", printed, flags=re.MULTILINE)
    assert float(paired) == pytest.approx(yours[2] - leader, abs=2e-3)
    assert "correlate negatively" not in printed
    np.save(tmp_path / "turned.npy", -np.load(tmp_path / "mine.npy"))
    score.judge_file("digits", str(tmp_path / "turned.npy"))
    assert "correlate negatively with what retraining does" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"^error: no bank 'digit': .* holds breast-cancer, "):
        score.judge_file("digit", str(tmp_path / "mine.npy"))
    np.save(tmp_path / "wrong.npy", np.zeros((3, 3)))
    with pytest.raises(SystemExit, match=r"wants \(32, 1000\), queries x examples"):
        score.judge_file("digits", str(tmp_path / "wrong.npy"))
    np.savez(tmp_path / "several.npz", np.zeros((32, 1000)))
    with pytest.raises(SystemExit, match=r"several\.npz: an archive of arrays; save one array by np\.save"):
        score.judge_file("digits", str(tmp_path / "several.npz"))


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no repository to clone")
def test_a_stranger_scores_by_one_command_in_a_fresh_clone(tmp_path: Path, warm: Warm) -> None:
    """A method that no board has, with what is committed alone; its LDS by scipy from the file's arrays."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, clone], check=True)
    with np.load(clone / "results/banks/digits.npz") as found:
        inside = np.unpackbits(found["subsets"], axis=1)[:, :1000].astype(float)
        single, standard = found["single_run"].astype(float), found["standard"].astype(float).mean(0)
    scores = np.random.default_rng(0).standard_normal((32, 1000))
    scores += 0.1 * np.linalg.lstsq(inside - 0.5, single[0] - single[0].mean(0), rcond=None)[0].T * 1000
    np.save(tmp_path / "mine.npy", scores)
    command = ["make", "--no-print-directory", "-n", "score", "BANK=digits", f"SCORES={tmp_path / 'mine.npy'}"]
    run = subprocess.check_output([*command, "PYTHON=python", "READY="], cwd=clone, text=True)
    python, *arguments = run.split()
    assert python == "python"
    done = warm.run(*arguments, cwd=clone, env=os.environ | {"PYTHONPATH": f"{clone / 'src'}:{clone}"})
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("yours"))
    printed = [float(value) for value in re.findall(r"(-?\d\.\d+) \(", line)]
    expected = [
        np.mean([spearmanr(inside @ scores[m], measured[:, m]).statistic for m in range(32)])
        for measured in (single[0], single[1:].mean(0), standard)
    ]
    assert min(expected) > 0.05  # a method that knows something
    assert printed == pytest.approx(expected, abs=6e-4)
    assert (clone / "outputs/score/digits.png").is_file()
