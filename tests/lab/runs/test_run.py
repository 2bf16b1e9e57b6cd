from __future__ import annotations

import bz2
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from scipy.stats import rankdata

from curvlab.lab import tables
from curvlab.lab.runs import run as runs
from curvlab.lab.runs.configuration import Entry, load_config
from curvlab.lab.runs.overrides import ConfigurationError
from curvlab.lab.runs.record import Commit
from curvlab.lab.runs.run import torch_device
from curvlab.lab.runs.tracking import Tracker
from tests.refusals import refuses

Demo = Callable[..., subprocess.CompletedProcess[str]]
OFF = ("tracker=none", "preset=smoke")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a tracker was told."""
    told: list[Any] = []

    class Recorder(Tracker):
        def log(self, metrics: Any) -> None:
            told.append(("log", metrics))

        def log_table(self, name: str, table: pd.DataFrame) -> None:
            told.append(("table", name, len(table)))

        def log_figure(self, name: str, path: Path) -> None:
            told.append(("figure", name, path.name))

        def log_folder(self, name: str, folder: Path) -> None:
            told.append(("folder", name, sorted(path.name for path in folder.iterdir())))

        def finish(self, error: str = "") -> None:
            told.append(("finish", error))

    monkeypatch.setattr("curvlab.lab.runs.run.start_tracker", lambda settings, **run: Recorder())
    return told


def column(*values: float) -> pd.DataFrame:
    return pd.DataFrame({"x": values})


def start(*overrides: str) -> Any:
    cfg = load_config(Entry("toy/fig1", Path("conf").absolute(), "toy-fig1"), [*OFF, *overrides])
    return runs.start(cfg, key="toy/fig1", title="a demonstration")


def record_of(run: runs.Run) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run.folder / "run.json").read_text())
    return content


def test_a_run_leaves_a_complete_folder(
    checkout: Path, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with start() as run:
        run.save_table(column(1 / 3))
        run.save_image(np.full((2, 3), 7, dtype=np.uint8), "figure_pixels.png")
        run.record_data("digits", "ab12")
        run.note(reduced=["points"], seeds=[0, 1])
        assert not (run.folder / "run.json").exists()
        run.save_record([{"name": "points", "ours": 2, "paper": 25}])
        curves = pd.DataFrame({"curve/a/loss": [2.0, 1.0], "curve/b/loss": [np.nan, 3.0]}, index=[0, 5])
        run.hand_to_tracker({"cost/products": 3.0}, [curves.rename_axis(index="x/step")])
    folder = checkout / "results" / "toy" / "fig1" / "smoke"
    names = ["figure_pixels.png", "run.json", "table.csv"]
    assert sorted(path.name for path in folder.iterdir()) == names
    np.testing.assert_array_equal(np.asarray(Image.open(folder / "figure_pixels.png")), np.full((2, 3), 7))
    record = record_of(run)
    assert (record["target"], record["title"], record["preset"]) == ("toy-fig1", "a demonstration", "smoke")
    assert (record["reduced"], record["seeds"], record["data"]) == (["points"], [0, 1], {"digits": "ab12"})
    assert record["settings"] == [{"name": "points", "ours": 2, "paper": 25}]
    assert set(calls[2][1]) == {"cost/products", "progress/units", "progress/seconds"}
    del calls[2]
    assert calls == [
        ("log", {"x/step": 0.0, "curve/a/loss": 2.0}),
        ("log", {"x/step": 5.0, "curve/a/loss": 1.0, "curve/b/loss": 3.0}),
        ("table", "table", 1),
        ("figure", "figure_pixels", "figure_pixels.png"),
        ("folder", "toy-fig1-smoke", names),
        ("finish", ""),
    ]
    assert capsys.readouterr().out == ""  # whoever opens a task alone is told of no results


def test_what_an_earlier_run_left_goes_with_the_first_table(checkout: Path, calls: list[Any]) -> None:
    with start() as run:
        for name in ("table", "gone"):
            run.save_table(column(1.0), name)
        run.save_record()
    before = (run.folder / "run.json").read_bytes()
    with pytest.raises(ZeroDivisionError), start() as run:
        _ = 1 / 0
    assert (run.folder / "run.json").read_bytes() == before  # kept until there is another result
    for name in ("claims.json", "figure.png", "rest.png", "large.csv.bz2", "older.csv.gz", "sweep/table.csv"):
        (run.folder / name).parent.mkdir(exist_ok=True)
        (run.folder / name).write_text("old")
    with pytest.raises(ZeroDivisionError), start() as run:  # noqa: PT012
        run.save_table(column(2.0))  # from here on the old record would be wrong
        run.save_table(column(2.0), "other")
        _ = 1 / 0  # e.g. killed while judging
    assert sorted(path.name for path in run.folder.iterdir()) == ["other.csv", "sweep", "table.csv"]
    assert (run.folder / "sweep" / "table.csv").read_text() == "old"
    assert calls[-1] == ("finish", "ZeroDivisionError: division by zero")


def test_interrupt_says_that_the_command_resumes(
    checkout: Path, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt), start():
        raise KeyboardInterrupt
    assert "toy-fig1: interrupted; finished units are kept, the same command resumes" in capsys.readouterr().err
    assert calls == [("finish", "KeyboardInterrupt: ")]


def test_table_has_so_many_digits_in_every_column(checkout: Path) -> None:
    table = pd.DataFrame(
        {"x": [1 / 3, 1e-10 / 3], "n": [1, 2], "mixed": ["a", 2 / 3], "single": np.float32([0.1, np.nan])},
        index=[5, 7],
    )
    with start() as run:
        path = run.save_table(table)
        short = run.save_table(table, "short", digits=2)
        for name in ("../table", "a/b", ""):
            refuses("use a plain file name of the result folder", run.save_table, table, name)
    assert short.read_text() == "x,n,mixed,single\n0.33,1,a,0.1\n3.3e-11,2,0.67,\n"
    assert path.read_text() == "x,n,mixed,single\n0.333333,1,a,0.1\n3.33333e-11,2,0.666667,\n"


def test_large_tables_are_packed(checkout: Path) -> None:
    for size, kept in ((3, "cloud.csv"), (20_000, "cloud.csv.bz2"), (3, "cloud.csv")):
        with start() as run:
            table = column(*np.arange(size) / 7)
            assert run.save_table(table, "cloud").name == kept
            assert [path.name for path in run.folder.iterdir()] == [kept]  # the other form is gone
            pd.testing.assert_frame_equal(tables.read_table(run.folder, "cloud"), table, rtol=1e-5)
            assert run.save_table(table, "cloud").read_bytes() == (run.folder / kept).read_bytes()


@pytest.mark.parametrize("broken", ["", "values", "order", "text", "missing"])
def test_tables_of_ranks_are_packed_as_such_and_no_others(checkout: Path, broken: str) -> None:
    random, parts = np.random.default_rng(0), []
    for task, networks, halves in (("first", 2, 60), ("second", 1, 40)):
        for network in range(networks):
            half, query = np.indices((halves, 32)).reshape(2, -1)
            truth = random.normal(size=(halves, 32))
            columns = {
                "influence @ 0.1": rankdata(truth, axis=0),
                "filter": rankdata(truth + 0.2 * random.normal(size=truth.shape), axis=0),
                "label, of few": rankdata(truth.round(), axis=0),  # ties
                "all alike": rankdata(0 * truth, axis=0),
                "BM25": rankdata(-truth, axis=0) if task == "second" else np.full(truth.shape, np.nan),
            }
            keys = {"task": task, "network": network, "half": half, "query": query}
            parts.append(pd.DataFrame(keys | {name: own.ravel() for name, own in columns.items()}))
    table = pd.concat(parts, ignore_index=True)
    if broken == "values":
        table.loc[3, "filter"] = 0.5
    elif broken == "order":
        table = table.iloc[::-1].reset_index(drop=True)
    elif broken == "text":
        table["filter"] = table["filter"].astype(str) + "th"
    elif broken == "missing":
        table.loc[3, "BM25"] = 1.0
    table = table.assign(**{"influence @ 0.1": table["influence @ 0.1"].astype(int)})
    with start() as run:
        path = run.save_table(table, "ranks")
    assert path.name == ("ranks.csv.bz2" if broken else "ranks.ranks.xz")
    pd.testing.assert_frame_equal(tables.read_table(run.folder, "ranks"), table, check_dtype=False)
    assert tables.names(run.folder) == ["ranks"]
    assert tables.as_written(table, "ranks").equals(tables.read_table(run.folder, "ranks"))
    text = tables.read_table(run.folder, "ranks", dtype=str, keep_default_na=False)
    assert text.task.iloc[0] in ("first", "second")
    assert set(text["half"]) == {str(half) for half in range(60)}
    if not broken:
        assert path.stat().st_size < 0.6 * len(bz2.compress(table.to_csv(index=False).encode()))


def draw(run: runs.Run, *names: str | int) -> torch.Tensor:
    return torch.rand(4, generator=run.generator(*names))


def test_generators_depend_on_seed_and_names_only(checkout: Path) -> None:
    with start() as run, start("seed=1") as other:
        torch.manual_seed(0)
        before = torch.get_rng_state()
        draws = [draw(run, *names) for names in (["train"], ["test"], ["train", 1], ["train", "1"])]
        draws.append(draw(other, "train"))
        assert torch.equal(draw(run, "train"), draws[0])
        assert torch.equal(torch.get_rng_state(), before)
    assert len({tuple(numbers.tolist()) for numbers in draws}) == len(draws)


def test_a_unit_needs_a_version_and_another_version_is_another_unit(checkout: Path) -> None:
    with start() as run:
        with pytest.raises(TypeError, match="version"):
            run.unit("toy", {}, dict)  # type: ignore[call-arg]
        for version in (1, 2, 1):
            run.unit("toy", {}, dict, version=version)
    assert (run.store.hits, run.store.misses) == (1, 2)


def test_every_unit_keeps_the_commit_that_computed_it(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Units of two commits, assembled by a third: the record tells them apart.
    runs_made = ((Commit("aaaa", True), 1), (Commit("bbbb", False), 3), (Commit("cccc", True), 3))
    for commit, num_units in runs_made:
        monkeypatch.setattr("curvlab.lab.runs.run.read_commit", lambda root, commit=commit: commit)
        with start() as run:
            for k in range(num_units):
                run.unit("toy/unit", {"k": k}, lambda k=k: {"x": k}, version=4)
            run.save_record()
    record = record_of(run)
    units = [(unit["commit"], unit["clean"], unit["count"], unit["version"]) for unit in record["units"]]
    assert units == [("aaaa", True, 1, 4), ("bbbb", False, 2, 4)]
    assert record["assembled"] == {"commit": "cccc", "clean": True}
    assert record["num_units"] == 3
    assert {"versions", "device", "function", "seconds", "num_matvecs"} <= set(record["units"][0])


def test_every_unit_counts_once_however_often_and_from_where_it_is_asked_for(checkout: Path) -> None:
    def inner(run: runs.Run) -> dict[str, Any]:
        def compute() -> dict[str, Any]:
            run.add_matvecs(10)
            end = time.process_time() + 0.02
            while time.process_time() < end:
                pass
            return {"x": 1}

        return run.unit("toy/inner", {}, compute, version=1)

    def outer(run: runs.Run) -> dict[str, Any]:
        run.add_matvecs(1)
        return inner(run)

    for again in (False, True):  # computed, then found in the store
        with start() as run:
            for _ in range(3):
                run.unit("toy/outer", {}, lambda run=run: outer(run), version=1)
            inner(run)
            run.save_record()
        record = record_of(run)
        found = {unit["name"]: (unit["count"], unit["num_matvecs"]) for unit in record["units"]}
        assert found == {"toy/inner": (1, 10), "toy/outer": (1, 1)}
        seconds = {unit["name"]: unit["seconds"] for unit in record["units"]}
        assert seconds["toy/inner"] >= 0.02 > seconds["toy/outer"]
        assert (record["num_matvecs"], record["num_units"]) == (11, 4)
        assert record["unit_seconds"] == pytest.approx(sum(seconds.values()), abs=2e-3)
        assert record["store"]["misses"] == (0 if again else 2)


def test_progress_is_said_at_every_change_of_work(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for num_seeds in (2, 3):
        with start() as run:
            for seed in range(num_seeds):
                run.unit("train", {"k": seed}, dict, version=1, about=f"training toy, seed {seed}")
            run.unit("score", {}, dict, version=1)
            run.save_table(pd.DataFrame({"x": [1]}))
            run.save_record()
    assert capsys.readouterr().err.splitlines() == [
        "toy-fig1: training toy, seed 0 (unit 1)",
        "toy-fig1: training toy, seed 1 (unit 2)",
        "toy-fig1: score (unit 3)",
        # What is there already goes by too fast to be listed: a line every two seconds.
        "toy-fig1: training toy, seed 0 (unit 1 of about 3, stored)",
        "toy-fig1: training toy, seed 2 (unit 3 of about 3)",
    ]


def test_units_of_another_seed_are_other_units_but_may_name_their_own(checkout: Path) -> None:
    values = []
    for seed in (0, 1, 0):
        with start(f"seed={seed}") as run:
            values.append(run.unit("toy", {}, lambda run=run: {"x": draw(run, "unit")}, version=1)["x"])
            run.unit("own", {"seed": 5}, lambda: {"x": 1}, version=1)
    assert torch.equal(values[0], values[2])
    assert not torch.equal(values[0], values[1])
    assert len(list((checkout / ".cache" / "store" / "own").rglob("*.pt"))) == 1


def test_a_unit_of_a_task_has_the_task_in_its_key(checkout: Path) -> None:
    @runs.unit("demo", version=1)
    def double(of: Any, /, *, number: int, **key: Any) -> dict[str, Any]:
        return {"found": [getattr(of, "name", "run"), 2 * number, key]}

    with start() as run:
        one, other = (SimpleNamespace(run=run, key={"name": name}, name=name) for name in ("one", "other"))
        assert double(one, number=3)["found"] == ["one", 6, {"name": "one"}]
        assert double(other, number=3)["found"][0] == "other"
        assert double(run, number=3, name="one")["found"][0] == "one"  # the same unit, found in the store


def test_progress_is_silent_without_a_terminal(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with start() as run, start("progress=false") as quiet:
        assert list(run.progress([1, 2], "steps")) == [1, 2]
        monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
        assert list(quiet.progress(range(2), "steps")) == [0, 1]
        assert capsys.readouterr().err == ""
        with run.progress(3, "loud steps") as bar:
            bar.update(3)
        assert "loud steps" in capsys.readouterr().err


def test_killed_write_is_cleaned_up(checkout: Path) -> None:
    with start() as run:
        run.folder.mkdir(parents=True)
        stale, live = run.folder / ".table.csv.a.tmp", run.folder / ".table.csv.b.tmp"
        stale.write_text("")
        live.write_text("")  # of another process that is writing now
        os.utime(stale, (0, 0))
        run.save_table(pd.DataFrame(), "note")
        assert (stale.exists(), live.exists()) == (False, True)


def test_whole_target_from_the_command_line(checkout: Path, demo: Demo) -> None:
    (checkout / "experiments" / "toy" / "fig1.py").write_text("""\
from pathlib import Path
import pandas as pd, torch
from curvlab.lab.runs import run as runs
from curvlab.lab.runs.configuration import Entry, main

def job(cfg):
    with runs.start(cfg, key="toy/fig1", title="demo") as run:
        n = cfg.num_train
        x = run.unit("toy", {"n": n}, lambda: {"x": torch.rand(n, generator=run.generator("x"))}, version=1)
        run.save_table(pd.DataFrame({"x": x["x"]}))
        if cfg.damping > 50:
            raise KeyboardInterrupt
        run.save_record()

if __name__ == "__main__":
    main(Entry("toy/fig1", Path("conf").absolute(), "toy-fig1"), job)
""")
    done = demo("-m", "tracker=none", "progress=false", "preset=smoke,laptop", "seed=1")
    assert (done.returncode, done.stderr) == (0, "")
    folders = ["laptop+seed=1", "smoke+seed=1"]
    assert sorted(path.parent.name for path in checkout.rglob("run.json")) == folders
    tables = {(checkout / "results/toy/fig1" / folder / "table.csv").read_text() for folder in folders}
    assert len(tables) == 2
    interrupted = demo("tracker=none", "progress=false", "damping=99")
    assert (interrupted.returncode, interrupted.stdout) == (130, "")
    assert interrupted.stderr == "toy-fig1: interrupted; finished units are kept, the same command resumes.\n"
    refused = demo("tracker=wandb", "tracker.mode=onlin")
    assert refused.returncode == 2
    assert refused.stderr == "error: unknown tracker.mode=onlin; use offline or online, or tracker=none.\n"


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_device("cpu") == torch.device("cpu")
    assert torch_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = "device=cuda:1, but torch sees no GPU here; use device=cpu"
    refuses(text, torch_device, "cuda:1", error=ConfigurationError)


def test_a_device_that_is_not_there_is_told_to_the_tracker(
    checkout: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError), start("device=cuda"):
        pytest.fail("it must not begin")
    text = "device=cuda, but torch sees no GPU here; use device=cpu or device=auto."
    assert calls == [("finish", f"ConfigurationError: {text}")]
