"""The driver: killed work goes on to the same numbers, and a file of other work is never taken."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlab import iterate as driver
from curvlab import progress as shown
from curvlab.curvature import GaussNewtonOperator
from curvlab.iterate import Checkpoint, CheckpointWarning, Key, SaveFile, iterate
from curvlab.linalg import DenseOperator, identity
from curvlab.solvers import BlockConjugateGradient, ConjugateGradient, MinimumResidual, Nystrom, TrainingFilter
from curvlab.spectrum import hutchinson_trace
from tests.refusals import refuses, stopped


@dataclass(frozen=True)
class Inner:
    total: Tensor
    history: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class WalkState:
    """All kinds of fields: a nested frozen state, random numbers, something that appears on the way."""

    x: Tensor
    inner: Inner
    generator: torch.Generator
    previous: Tensor | None = None
    num_steps: int = 0
    done: bool = False


@dataclass(frozen=True)
class Walk:
    """x <- A x + noise, six steps; the result is recomputed from the state."""

    operator: DenseOperator
    start: Tensor
    seed: int = 0
    num_steps: int = 6

    def depends_on(self) -> Mapping[str, Any]:
        return {"operator": self.operator, "start": self.start, "seed": self.seed, "num_steps": self.num_steps}

    def init(self) -> WalkState:
        return WalkState(self.start, Inner(self.start), torch.Generator().manual_seed(self.seed))

    def step(self, state: WalkState) -> WalkState:
        x = self.operator @ state.x + torch.randn(len(self.start), generator=state.generator)
        inner = Inner(state.inner.total + x, [*state.inner.history, float(x.norm())])
        number = state.num_steps + 1
        return replace(state, x=x, inner=inner, previous=state.x, num_steps=number, done=number == self.num_steps)

    def result(self, state: WalkState) -> list[Tensor]:
        assert state.previous is not None
        return [state.x, state.inner.total, state.previous, torch.tensor(state.inner.history)]


class Descent:
    """A state that is changed in place, with a model and an optimizer, as training has."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 1)
        with torch.no_grad():
            self.model.weight.fill_(1.0)
            self.model.bias.fill_(0.5)
        self.x, self.y = torch.eye(3), torch.arange(3.0)[:, None]

    @dataclass
    class State:
        model: nn.Module
        optimizer: torch.optim.Optimizer
        rates: list[float]
        num_steps: int = 0

        @property
        def done(self) -> bool:
            return self.num_steps == 6

        status = "going down"

    def depends_on(self) -> Mapping[str, Any]:
        return {"model": self.model, "data": (self.x, self.y)}

    def init(self) -> State:
        return self.State(self.model, torch.optim.Adam(self.model.parameters(), lr=0.1), [])

    def step(self, state: State) -> State:
        state.optimizer.zero_grad()
        nn.functional.mse_loss(state.model(self.x), self.y).backward()
        state.optimizer.step()
        state.rates.append(0.1)
        state.num_steps += 1
        return state

    def result(self, state: State) -> list[Tensor]:
        return [p.detach().clone() for p in state.model.parameters()] + [torch.tensor(state.rates)]


def walk(scale: float = 0.5, **settings: Any) -> Walk:
    return Walk(DenseOperator(scale * torch.eye(4)), torch.ones(4), **settings)


@pytest.mark.parametrize("step", range(1, 7))
@pytest.mark.parametrize("method", [walk, Descent], ids=["frozen", "in place"])
def test_killed_work_ends_at_the_same_numbers(method: Any, step: int, tmp_path: Path) -> None:
    place = Checkpoint(tmp_path / "deep" / "work.pt", every=1)
    whole = iterate(method(), name="work")
    stopped(step, iterate, method(), name="work", checkpoint=place)
    (tmp_path / "deep").mkdir(exist_ok=True)
    (tmp_path / "deep" / ".work.pt.xyz.tmp").touch()  # of a kill in the middle of a save
    seen: list[int] = []
    resumed = iterate(method(), name="work", checkpoint=place, callback=lambda state: seen.append(state.num_steps))
    assert seen == list(range(max(1, step), 7))  # the step that was not saved is taken again
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    assert list((tmp_path / "deep").iterdir()) == []  # the next call of the same work begins anew


def test_work_that_was_complete_when_killed_has_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At the last step nothing is saved, but the state before it may come from a file that knows no step more.
    place = tmp_path / "work.pt"
    file = SaveFile(Checkpoint(place), Key("work", walk().depends_on()))
    state = walk().init()
    for _ in range(6):
        state = walk().step(state)
    file.save(driver._plain(state))
    monkeypatch.setattr(Walk, "step", lambda *_: pytest.fail("there is no step left"))
    assert torch.equal(iterate(walk(), name="work", checkpoint=place)[0], state.x)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: walk(0.6), "operator"),
        (lambda: replace(walk(), operator=walk().operator + 0.1 * identity), "operator"),
        (lambda: replace(walk(), start=torch.zeros(4)), "start"),
        (lambda: walk(seed=1), "seed"),
        (lambda: walk(num_steps=7), "num_steps"),
        (Descent, "data, model, num_steps, operator, seed, start"),
    ],
)
def test_a_file_of_other_work_is_refused(other: Any, named: str, tmp_path: Path) -> None:
    place = Checkpoint(tmp_path / "work.pt", every=1)
    stopped(3, iterate, walk(), name="work", checkpoint=place)
    with pytest.raises(
        ValueError, match=rf"work.pt belongs to other work \({named} differs?\): give each its own"
    ):
        iterate(other(), name="work", checkpoint=place)
    refuses(r"\(work differs?\)", iterate, walk(), name="another", checkpoint=place)


def test_an_operator_that_rounds_otherwise_is_the_same(tmp_path: Path) -> None:
    place = Checkpoint(tmp_path / "work.pt", every=1)
    stopped(3, iterate, walk(), name="work", checkpoint=place)
    iterate(walk(0.5 * (1 + 1e-6)), name="work", checkpoint=place)


def test_an_operator_is_asked_only_when_there_is_a_file_or_something_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DenseOperator, "probe", lambda _: pytest.fail("nothing is saved"))
    iterate(walk(), name="work", checkpoint=tmp_path / "work.pt")


def test_what_the_work_depends_on_must_be_known(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Own(Walk):
        extra: Any = None

        def depends_on(self) -> Mapping[str, Any]:
            return {"generator": self.extra}

    with pytest.raises(ValueError, match="keeps the state of the generator: pass generator="):
        iterate(Own(walk().operator, torch.ones(4)), name="work", checkpoint=tmp_path / "work.pt")
    with pytest.raises(TypeError, match="or leave the checkpoint out"):
        iterate(Own(walk().operator, torch.ones(4), extra=iter([])), name="a", checkpoint=tmp_path / "work.pt")
    refuses("every must be at least 1 step", Checkpoint, "work.pt", every=0)


class Terminal:
    """A terminal that keeps what is written to it."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...


@pytest.mark.parametrize("progress", [True, False])
def test_a_bar_shows_name_steps_and_status_unless_it_is_turned_off(
    progress: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(shown, "_SECONDS_BEFORE_BAR", 0.0)
    iterate(Descent(), name="descent", total=6, progress=progress)
    assert ("descent" in terminal.text) == progress
    assert ("/6" in terminal.text) == progress


@dataclass(frozen=True)
class Slow(Walk):
    """Steps of four seconds, by a clock of its own; the first takes ten."""

    def step(self, state: WalkState) -> WalkState:
        Slow.now += 4.0 if state.num_steps else 10.0
        return super().step(state)

    def expected_steps(self, state: WalkState) -> float | None:
        return 50.0 if state.num_steps > 2 else None


@pytest.mark.parametrize(
    ("total", "num_steps", "progress", "told"),
    [
        (100, 6, True, ["walk: about 7 min"]),  # 10 s, and 99 of 4 s
        (100, 6, "of one seed", ["of one seed: about 7 min"]),
        (None, 6, True, ["walk: about 3 min"]),  # as the method expects, after three steps
        (100, 6, False, []),
        (None, 2, True, []),
    ],
)
def test_how_long_it_will_take_is_told_once_and_not_where_the_bar_is_turned_off(
    total: int | None,
    num_steps: int,
    progress: bool | str,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Slow.now = 0.0
    monkeypatch.setattr(shown.time, "monotonic", lambda: Slow.now)
    work = Slow(DenseOperator(0.5 * torch.eye(4)), torch.ones(4), num_steps=num_steps)
    with caplog.at_level("INFO", logger="curvlab"):
        iterate(work, name="walk", total=total, progress=progress)
    assert [record.getMessage() for record in caplog.records] == told


def test_a_product_tells_its_time_and_the_first_of_many_that_of_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = iter(range(0, 10**6, 5))
    monkeypatch.setattr(shown.time, "monotonic", lambda: float(next(clock)))
    inputs = torch.randn(40, 3)
    operator = GaussNewtonOperator(nn.Linear(3, 2), nn.MSELoss(), (inputs, inputs[:, :2]), batch_size=10)
    with caplog.at_level("INFO", logger="curvlab"):
        operator @ operator.randn(2, 0)
        assert caplog.messages == ["product: about 20 s"]
        caplog.clear()
        hutchinson_trace(operator, num_matvecs=8, chunk_size=1, generator=0)
    assert len(caplog.messages) == 1, "later products are silent"
    assert caplog.messages[0].startswith("trace: about ")


@pytest.mark.parametrize(
    "solver",
    [
        ConjugateGradient(),
        BlockConjugateGradient(),
        BlockConjugateGradient(preconditioner=Nystrom(9)),
        MinimumResidual(),
        TrainingFilter(time=1e3),
    ],
    ids=["cg", "block", "nystrom", "minres", "filter"],
)
def test_a_solve_tells_at_its_start_about_how_long_it_will_take(
    solver: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = torch.randn(90, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, -2, 40)
    operator = GaussNewtonOperator(nn.Linear(40, 3), nn.MSELoss(), (inputs, inputs[:, :3]), batch_size=10)
    own = operator._add_products

    def slow(*batch: Any) -> None:
        silent.extend([Slow.now] * (not caplog.messages))
        Slow.now += 0.01 * len(batch[1]) * len(batch[3])
        own(*batch)

    Slow.now, silent = 0.0, list[float]()
    monkeypatch.setattr(shown.time, "monotonic", lambda: Slow.now)
    monkeypatch.setattr(operator, "_add_products", slow)
    damped = operator + 1e-3 * identity
    with caplog.at_level("INFO", logger="curvlab"):
        solver.solve(damped, operator.randn(5, 1))
    (message,) = caplog.messages
    number, unit = message.rpartition("about ")[2].split()
    assert 0.5 < float(number) * {"s": 1, "min": 60}[unit] / Slow.now < 3
    assert silent[-1] < 10


def test_a_notebook_shows_no_bar_of_a_part_of_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(Terminal, "isatty", lambda _: False)
    assert not shown.progress_bar("product", total=4, part=True).disable
    with shown.around(shown.Forecast("walk", 0)):
        assert shown.progress_bar("product", total=4, part=True).disable


def test_short_work_says_nothing_of_its_time(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="curvlab"):
        iterate(walk(), name="walk", total=6)
    assert not caplog.records


# -------------------------------------------------------------------------------------- the file
def save_file(path: Path | str, every: int | None = None) -> SaveFile:
    return SaveFile(Checkpoint(path, every), Key("work", {}))


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    file = save_file(tmp_path / "work.pt")
    assert file.load() is None
    file.save({"steps": 1})
    with pytest.raises(AttributeError):
        file.save({"steps": lambda: None})  # cannot be pickled
    assert file.load() == {"steps": 1}


def test_a_place_that_cannot_be_written_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    seen: list[Any] = []
    for below in ("work.pt", "deep/work.pt"):
        with pytest.raises(OSError, match=r"cannot be written, no folder is .*file: '.*work\.pt'"):
            iterate(walk(), name="walk", checkpoint=tmp_path / "file" / below, callback=seen.append)
    assert seen == []


def test_a_disk_that_runs_full_costs_the_save_and_not_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    whole = iterate(walk(), name="walk")
    monkeypatch.setattr("curvlab.files.os.fsync", full)
    with pytest.warns(CheckpointWarning, match=r"work\.pt is as it was before \(No space left on device\)"):
        kept = iterate(walk(), name="walk", checkpoint=Checkpoint(tmp_path / "work.pt", every=1))
    assert all(torch.equal(a, b) for a, b in zip(whole, kept, strict=True))
    monkeypatch.setattr(Path, "unlink", full)
    with pytest.warns(CheckpointWarning, match="as it was before"):  # nor does a file that stays
        iterate(walk(), name="walk", checkpoint=tmp_path / "work.pt")


@pytest.mark.parametrize("damage", ["cut", "empty", "foreign"])
def test_a_file_that_cannot_be_read_is_named_and_put_aside(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "work.pt"
    save_file(path).save({"steps": 1})
    content = {"cut": path.read_bytes()[:-5], "empty": b"", "foreign": b"a file of the user's own"}[damage]
    path.write_bytes(content)
    with pytest.warns(
        CheckpointWarning, match=r"work\.pt is no readable checkpoint .*: it is now work\.pt\.damaged"
    ):
        assert save_file(path).load() is None
    save_file(path).save({"steps": 2})
    assert save_file(path).load() == {"steps": 2}
    assert (tmp_path / "work.pt.damaged").read_bytes() == content


class Clock:
    """Time that passes when it is told to; a write takes `seconds_to_write`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds_to_write: float = 0.0) -> None:
        self.now = 0.0
        monkeypatch.setattr(driver.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(driver, "write_atomically", lambda path, content: self.advance(seconds_to_write))

    def advance(self, seconds: float) -> None:
        self.now += seconds


def test_saves_are_due_every_minute_and_by_steps_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    place, by_steps = save_file("work.pt"), save_file("work.pt", every=100)
    assert [step for step in range(1, 301) if by_steps.due(step)] == [100, 200, 300]
    assert not any(place.due(step) for step in range(1, 301))
    clock.advance(60.0)
    assert place.due(7)
    assert by_steps.due(7)
    place.save({})
    assert not place.due(8)


@pytest.mark.parametrize("seconds_to_write", [0.1, 1.0, 20.0])
def test_saving_takes_little_of_the_time_however_large_the_state(
    monkeypatch: pytest.MonkeyPatch, seconds_to_write: float
) -> None:
    clock = Clock(monkeypatch, seconds_to_write)
    file, saves = save_file("work.pt"), 0
    for step in range(20_000):
        clock.advance(1.0)
        if file.due(step):
            file.save({})
            saves += 1
    assert saves >= 15
    assert saves * seconds_to_write <= 0.022 * clock.now  # what the first save takes is not known before it
