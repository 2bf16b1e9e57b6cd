"""The store of units of work: who computes, what is damaged; killed units go on from their checkpoint."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import multiprocessing
import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from curvlab.iterate import Checkpoint, CheckpointWarning
from curvlab.lab import start
from curvlab.lab.runs.configuration import Entry, load_config
from curvlab.lab.runs.store import Store, StoreWarning, digest, plain
from curvlab.training import TrainingState, train
from tests.refusals import refuses

CONFIG = {"damping": 0.1, "seed": 0}


FORK = multiprocessing.get_context("fork")  # real processes that start fast: they have what this one imported


def work(root: Path, log: Path, seconds: float, *, units: int = 6, start_at: float = 0.0) -> None:
    """Several units, each with its own numbers; every computation leaves a line in the log."""
    warnings.simplefilter("error")  # a damaged entry ends this process with status 1
    store = Store(root)

    def compute(seed: int) -> dict[str, Any]:
        with log.open("a") as file:
            file.write(f"{seed}\n")
        time.sleep(seconds)
        return {"x": numbers(seed), "seed": seed}

    time.sleep(max(0.0, start_at - time.time()))
    for seed in range(units):
        store.get_or_compute("unit", {"seed": seed}, lambda seed=seed: compute(seed))
    Path(f"{log}.{os.getpid()}").write_text(f"{store.hits} {store.misses}")


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(200_000, generator=torch.Generator().manual_seed(seed))


def refuse() -> dict[str, Any]:
    raise AssertionError("computed although it is stored")


def entry_of(root: Path) -> Path:
    (entry,) = root.rglob("*.pt")
    return entry


def test_second_call_reads_what_the_first_computed(tmp_path: Path) -> None:
    payload = {"x": torch.tensor([0.1, 0.2], dtype=torch.float64), "n": 3, "label": "a", "rows": [1.5, [2, None]]}
    store = Store(tmp_path)
    first = store.get_or_compute("toy/scores", CONFIG, lambda: payload)
    again = Store(tmp_path)
    second = again.get_or_compute("toy/scores", {"seed": 0, "damping": 0.1}, refuse)
    for read in (first, second):
        assert torch.equal(read.pop("x"), payload["x"])
        assert read == {"n": 3, "label": "a", "rows": [1.5, [2, None]]}
    assert (store.hits, store.misses, again.hits, again.misses) == (0, 1, 1, 0)


def test_name_and_config_both_make_the_key_and_stand_beside_the_entry(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.get_or_compute("toy/sco res", CONFIG, dict)
    entry = entry_of(tmp_path)
    assert entry.parent == tmp_path / "toy" / "sco-res"
    assert json.loads(entry.with_suffix(".json").read_text()) == {"name": "toy/sco res", "config": CONFIG}
    for name, config in (("a", {"x": 1}), ("b", {"x": 1}), ("a", {"x": 1.0}), ("a", {"x": 2})):
        store.get_or_compute(name, config, dict)
    assert store.misses == 5


def test_types_are_the_same_computed_and_read(tmp_path: Path) -> None:
    weights = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).T)
    view = torch.zeros(1_000_000)[:1]
    payload = {"w": weights, "n": np.float64(0.1), "k": np.int64(2), "pair": (1, 2), "view": view}
    for store in (Store(tmp_path), Store(tmp_path)):
        read = store.get_or_compute("toy", CONFIG, lambda: payload)
        assert type(read["w"]) is torch.Tensor
        assert not read["w"].requires_grad
        assert torch.equal(read["w"], weights)
        assert (type(read["n"]), type(read["k"]), read["pair"]) == (float, int, [1, 2])
    assert entry_of(tmp_path).stat().st_size < 10_000  # a view stores itself and not its base


def test_force_computes_each_unit_once_more(tmp_path: Path) -> None:
    Store(tmp_path).get_or_compute("toy", CONFIG, lambda: {"x": 1})
    forced = Store(tmp_path, force=True)
    assert forced.get_or_compute("toy", CONFIG, lambda: {"x": 2}) == {"x": 2}
    assert forced.get_or_compute("toy", CONFIG, refuse) == {"x": 2}
    assert Store(tmp_path).get_or_compute("toy", CONFIG, refuse) == {"x": 2}


def flip_a_bit(entry: Path) -> None:
    content = bytearray(entry.read_bytes())
    content[-300] ^= 1
    entry.write_bytes(bytes(content))


def put_another_config_in_its_place(entry: Path) -> None:
    Store(entry.parents[1] / "other").get_or_compute("toy", {"damping": 0.2}, lambda: {"x": 7})
    entry.write_bytes(entry_of(entry.parents[1] / "other").read_bytes())


def replace_by_a_plain_pickle(entry: Path) -> None:
    torch.save({"payload": {"x": 7}, "seconds": 0.0}, entry)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda entry: entry.write_bytes(entry.read_bytes()[:-20]), "its checksum is wrong"),
        (lambda entry: entry.write_bytes(b""), "it does not begin with 'curvlab-store-3 [0-9a-f]+'"),
        (flip_a_bit, "its checksum is wrong"),
        (put_another_config_in_its_place, "it does not begin with .*"),
        (replace_by_a_plain_pickle, "it does not begin with .*"),
    ],
)
def test_damaged_entry_is_named_and_computed_again(tmp_path: Path, damage: Any, reason: str) -> None:
    root = tmp_path / "store"
    Store(root).get_or_compute("toy", CONFIG, lambda: {"x": 1})
    entry = entry_of(root)
    damage(entry)
    store = Store(root)
    with pytest.warns(
        StoreWarning, match=f"{entry.name} is damaged .{reason}.; it is not used but computed again"
    ):
        assert store.get_or_compute("toy", CONFIG, lambda: {"x": 2}) == {"x": 2}
    assert (store.hits, store.misses) == (0, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Store(root).get_or_compute("toy", CONFIG, refuse) == {"x": 2}


def test_entry_that_would_run_code_is_not_trusted(tmp_path: Path) -> None:
    # A valid header over a pickle of something that weights_only refuses.
    Store(tmp_path).get_or_compute("toy", CONFIG, dict)
    buffer = io.BytesIO()
    torch.save({"payload": os.getcwd, "seconds": 0.0}, buffer)
    body = buffer.getvalue()
    header = f"curvlab-store-3 {entry_of(tmp_path).stem} {hashlib.sha256(body).hexdigest()}\n"
    entry_of(tmp_path).write_bytes(header.encode() + body)
    with pytest.warns(StoreWarning, match="it does not load: UnpicklingError"):
        assert Store(tmp_path).get_or_compute("toy", CONFIG, lambda: {"x": 2}) == {"x": 2}


def test_failing_unit_stores_nothing(tmp_path: Path) -> None:
    def fail() -> dict[str, Any]:
        raise FloatingPointError("nan")

    with pytest.raises(FloatingPointError):
        Store(tmp_path).get_or_compute("toy", CONFIG, fail)
    assert Store(tmp_path).get_or_compute("toy", CONFIG, lambda: {"x": 1}) == {"x": 1}


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        ({"scores": [1, np.zeros(2)]}, r"toy\.scores\[1\] is a ndarray; .*torch\.from_numpy"),
        ({"model": torch.nn.Linear(1, 1)}, r"toy\.model is a Linear; a unit returns tensors, numbers"),
        ({3: 1}, "toy has the key 3; use strings"),
        ([1, 2], "unit 'toy' returned a list; return a dict of named results"),
    ],
)
def test_unstorable_payload_is_refused_by_name(tmp_path: Path, payload: Any, text: str) -> None:
    refuses(text, Store(tmp_path).get_or_compute, "toy", CONFIG, lambda: payload, error=TypeError)


def test_names_stay_inside_the_store_and_an_unusable_root_names_the_setting(tmp_path: Path) -> None:
    compute, text = Store(tmp_path).get_or_compute, "has an empty part; name it like 'lissa/scores'"
    for name in ("", "a//b", "../outside", "/etc"):
        refuses(text, compute, name, CONFIG, dict)
    (tmp_path / "file").write_text("")
    compute = Store(tmp_path / "file").get_or_compute
    text = r"cannot write to the store .*choose another folder with store\.root="
    refuses(text, compute, "toy", CONFIG, dict, error=OSError)


def test_killed_at_random_moments_loses_at_most_the_unit_at_work(tmp_path: Path) -> None:
    moments = random.Random(0)
    root, log, units = tmp_path / "store", tmp_path / "log", 20
    killed = 0
    for attempt in range(11):
        worker = FORK.Process(target=work, args=(root, log, 0.002), kwargs={"units": units})
        started = log.stat().st_size if log.exists() else 0
        worker.start()
        while worker.is_alive() and (not log.exists() or log.stat().st_size == started):
            time.sleep(0.0005)  # until it is inside its first unit
        if attempt < 10:
            worker.join(moments.uniform(0.0, 0.02))
            worker.kill()
        worker.join()
        assert worker.exitcode in (0, -signal.SIGKILL)
        killed += worker.exitcode != 0
    assert worker.exitcode == 0
    assert killed >= 2
    assert len(log.read_text().splitlines()) <= units + killed
    for seed in range(units):
        payload = Store(root).get_or_compute("unit", {"seed": seed}, refuse)
        assert torch.equal(payload["x"], numbers(seed))


def test_temporary_file_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    Store(tmp_path).get_or_compute("toy", CONFIG, dict)
    entry = entry_of(tmp_path)
    stale = entry.parent / f".{entry.name}.abc.tmp"
    stale.write_bytes(b"half")
    entry.unlink()
    Store(tmp_path).get_or_compute("toy", CONFIG, dict)
    assert not stale.exists()


def test_two_processes_compute_every_unit_once(tmp_path: Path) -> None:
    root, log = tmp_path / "store", tmp_path / "log"
    start_at = time.time() + 0.5
    workers = [FORK.Process(target=work, args=(root, log, 0.05), kwargs={"start_at": start_at}) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert sorted(log.read_text().split()) == [str(seed) for seed in range(6)]
    counts = [[int(word) for word in path.read_text().split()] for path in tmp_path.glob("log.*")]
    assert sum(hits for hits, _ in counts) == sum(misses for _, misses in counts) == 6


def test_second_process_says_that_it_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "log"
    worker = FORK.Process(target=work, args=(tmp_path / "store", log, 0.3))
    worker.start()
    while not log.exists():
        time.sleep(0.002)
    with caplog.at_level(logging.WARNING):
        payload = Store(tmp_path / "store").get_or_compute("unit", {"seed": 0}, refuse)
    worker.kill()
    worker.join()
    assert torch.equal(payload["x"], numbers(0))
    assert "waiting for unit unit, which another process computes" in caplog.text


def test_digest_is_sha256_of_sorted_compact_json_with_interpolations_resolved() -> None:
    expected = hashlib.sha256(b'{"a":[1,2.5,"x",null,true],"b":{"c":0.1}}').hexdigest()
    assert digest({"b": {"c": 0.1}, "a": (1, 2.5, "x", None, True)}) == expected
    cfg = OmegaConf.create({"seed": 3, "copy": "${seed}", "widths": [1, 2]})
    assert plain({"inner": cfg}) == {"inner": {"seed": 3, "copy": 3, "widths": [1, 2]}}


def test_floats_are_exact_and_integers_are_not_floats() -> None:
    keys = [digest({"x": x}) for x in (0.1, 0.1 + 1e-18, np.nextafter(0.1, 1), 1, 1.0, True, "1", -0.0, 0.0)]
    assert keys[0] == keys[1]  # the same double
    assert len(set(keys[1:])) == len(keys) - 1
    assert digest({"x": np.float64(0.1)}) == keys[0]


def test_what_has_no_exact_text_is_refused() -> None:
    for value in (torch.zeros(2), np.zeros(2), {1, 2}, object()):
        text = r"config\.solver\[1\] is a .*use numbers, strings, lists and mappings"
        refuses(text, digest, {"solver": [0, value]}, error=TypeError)
    refuses(r"config has the key 1; use strings as keys, here '1'", digest, {1: 2}, error=TypeError)


# ----------------------------------------------------------------------------- units that are killed in the middle
NUM_STEPS, EVERY = 48, 10


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    raise KeyboardInterrupt


def compute(
    folder: Path, log: Path, end: int | None = None, how: Callable[[], None] = interrupt
) -> dict[str, Any]:
    """Train with dropout and momentum; write every step to the log, and end at one of them."""

    def seen(state: TrainingState) -> None:
        with log.open("a") as file:
            file.write(f"{state.num_steps}\n")
        if state.num_steps == end:
            how()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
    inputs = torch.randn(60, 5, generator=torch.Generator().manual_seed(1))
    history = train(
        model,
        nn.MSELoss(),
        (inputs, inputs.prod(1, keepdim=True)),
        num_steps=NUM_STEPS,
        batch_size=7,
        lr=0.05,
        schedule="cosine",
        checkpoint=Checkpoint(folder / "training.pt", every=EVERY),
        generator=2,
        callback=seen,
    )
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"weights": weights, "losses": list(history.step_losses)}


def run_unit(
    place: Path,
    log: Path,
    end: int | None = None,
    how: Callable[[], None] = interrupt,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    os.chdir(place)
    entry = Entry("toy/fig1", Path("conf").absolute(), "toy-fig1")
    cfg = load_config(entry, ["tracker=none", "preset=smoke", *overrides])
    with start(cfg, key="toy/fig1", title="a demonstration") as run:
        found = run.unit(
            "toy/trained",
            {"num_steps": NUM_STEPS},
            lambda folder: compute(folder, log, end, how),
            version=1,
            about="training toy, seed 0",
            resumes=True,
        )
        run.save_record()
    return found


def together(*ends: tuple[Any, ...]) -> list[int | None]:
    """Run units with these arguments in processes that are started at once; return how they ended."""
    started = [FORK.Process(target=run_unit, args=arguments) for arguments in ends]
    for each in (*(process.start for process in started), *(process.join for process in started)):
        each()
    return [process.exitcode for process in started]


def steps(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().splitlines()]


def unfinished(checkout: Path) -> list[Path]:
    return list((checkout / ".cache" / "store").rglob("*.unfinished/*/*"))


def whole(tmp_path: Path) -> dict[str, Any]:
    return compute(tmp_path / "whole", tmp_path / "whole.log")


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return torch.equal(found["weights"], expected["weights"]) and found["losses"] == expected["losses"]


def test_a_unit_killed_twice_ends_at_the_same_numbers(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    for end in (25, 33):
        assert together((checkout, log, end, die)) == [-signal.SIGKILL]
    assert [path.name for path in unfinished(checkout)] == ["training.pt"]
    found = run_unit(checkout, log)
    assert steps(log) == [*range(1, 26), *range(21, 34), *range(31, NUM_STEPS + 1)]
    assert same(found, whole(tmp_path))
    assert not list((checkout / ".cache" / "store").rglob("*.unfinished"))
    assert "toy-fig1: training toy, seed 0 (unit 1, resumed)\n" in capsys.readouterr().err
    (record,) = checkout.rglob("run.json")
    (unit,) = json.loads(record.read_text())["units"]
    assert unit["resumed"] is True
    run_unit(checkout, log)  # found in the store now
    assert steps(log).count(NUM_STEPS) == 1


def test_a_damaged_checkpoint_is_named_and_the_unit_starts_afresh(checkout: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(KeyboardInterrupt):
        run_unit(checkout, log, 25)
    (path,) = unfinished(checkout)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.warns(
        CheckpointWarning, match=r"training\.pt is no readable checkpoint \(its checksum is wrong\)"
    ):
        found = run_unit(checkout, log)
    assert steps(log) == [*range(1, 26), *range(1, NUM_STEPS + 1)]
    assert same(found, whole(tmp_path))
    assert not list((checkout / ".cache" / "store").rglob("*.unfinished"))


@pytest.mark.parametrize("change", ["code", "versions", "config", "force"])
def test_what_other_code_or_another_config_has_left_is_not_used(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    log = tmp_path / "log"
    with pytest.raises(KeyboardInterrupt):
        run_unit(checkout, log, 25)
    if change == "code":
        monkeypatch.setattr("curvlab.lab.runs.run.source_hash", lambda: "changed since")
    if change == "versions":
        monkeypatch.setattr("curvlab.lab.runs.run.versions", lambda: {"torch": "changed since"})
    overrides = {"config": ["seed=1"], "force": ["force=true"]}
    found = run_unit(checkout, log, overrides=overrides.get(change, []))
    assert steps(log) == [*range(1, 26), *range(1, NUM_STEPS + 1)]
    assert same(found, whole(tmp_path))
    assert len(unfinished(checkout)) == (change == "config")  # that of the other unit, which may still go on


def test_two_processes_never_share_the_folder(checkout: Path, tmp_path: Path) -> None:
    """Both are started at once: the second waits, and finds the unit stored."""
    log = tmp_path / "log"
    assert together((checkout, log), (checkout, log)) == [0, 0]
    assert steps(log) == list(range(1, NUM_STEPS + 1))
