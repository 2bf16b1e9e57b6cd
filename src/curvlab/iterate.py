"""One driver for everything that steps: solvers, estimators, training, sampling.

A method says what one step is. The driver owns the rest: progress bar, callback, saving, and going on where a
killed run left off. Every public call that may take long has the arguments `progress`, `checkpoint` and
`callback`, and passes them to `iterate`.

    @dataclass(frozen=True)
    class HalvingState:                        # what must be carried from step to step
        x: Tensor
        num_steps: int = 0
        done: bool = False

    @dataclass(frozen=True)
    class Halving:                             # a method, bound to its problem
        start: Tensor

        def depends_on(self):                  # all that the numbers depend on
            return {"start": self.start}

        def init(self):
            return HalvingState(self.start)

        def step(self, state):
            return HalvingState(state.x / 2, state.num_steps + 1, bool((state.x < 1).all()))

        def result(self, state):
            return state.x

    x = iterate(Halving(start), name="halving", progress=True, checkpoint="halving.pt", callback=print)

Every layer may import this module.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from curvlab.described import described
from curvlab.files import DamagedFileError, check_place, decode, encode, remove_stale, write_atomically
from curvlab.progress import around, can_be_silent, progress_bar
from curvlab.ranks import Ranks

SECONDS_BETWEEN_SAVES = 60.0  # the work that a kill may cost
MAX_SHARE = 0.02  # of the time that saving may take: where a save takes longer than 1.2 s, saves become rarer
_HEADER = "curvlab-checkpoint-2"


class CheckpointWarning(UserWarning):
    """A checkpoint cannot be read, and its work starts afresh; or not be written, and the work goes on without."""


class State(Protocol):
    """What a method carries from step to step: a dataclass, frozen or changed in place.

    A field is saved, and restored, by its type:
    tensors, numbers, strings, None, and lists, tuples and dicts of them: as they are, on their kind of device;
    torch.Generator: its state, set in the generator that `init` put there;
    what has state_dict and load_state_dict (models, optimizers, schedulers): its state, loaded in place;
    dataclasses: field by field.

    Docstrings of states name `num_steps` and `done` only where they say more than their docstrings here.

    A state may have a property `status`, a short text for the progress bar, and `end`, the number of the last step
    where that is decided on the way.
    """

    @property
    def num_steps(self) -> int:
        """Steps taken so far."""
        ...

    @property
    def done(self) -> bool:
        """Whether this was the last step."""
        ...


S = TypeVar("S", bound=State)
R_co = TypeVar("R_co", covariant=True)


class Method(Protocol[S, R_co]):
    """An iteration, bound to the problem it works on."""

    def depends_on(self) -> Mapping[str, Any]:
        """Return all that the numbers depend on, by name; a checkpoint of other work is refused.

        Tensors, modules, functions, data sets, settings (see `described`). A linear operator counts by its product
        with one fixed vector, compared to half of its dtype's digits: another GPU rounds otherwise. That product
        is computed only when there is a file, or something to save. Called before `init`.
        """
        ...

    def init(self) -> S:
        """Return the state before the first step. Called before a restore, too."""
        ...

    def step(self, state: S) -> S:
        """Return the state after one more step; the same object where it is changed in place.

        It may find that the step before was the last one: then num_steps stays, and `callback` is not called.
        """
        ...

    def result(self, state: S) -> R_co:
        """Return the answer. Errors that it states are computed here, from the state as it is."""
        ...

    # For the forecast, where no total is known, a method may have `expected_steps(state) -> float | None`, and
    # `foreseen(columns) -> float | None`: how many products of so many columns it takes, asked before the first.


@dataclass(frozen=True)
class Checkpoint:
    """Where unfinished work is kept, and how often.

    Attributes:
        path: of the file, replaced atomically; its folder is created when needed. Removed when the work is done.
        every: save after so many steps, too; None: every minute alone.
    """

    path: str | Path
    every: int | None = None

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ValueError(f"every must be at least 1 step, got {self.every}")


@can_be_silent
def iterate(
    method: Method[S, R_co],
    *,
    name: str,
    total: int | None = None,
    progress: bool | str = True,
    callback: Callable[[S], object] | None = None,
    checkpoint: str | Path | Checkpoint | SaveFile | None = None,
) -> R_co:
    """Take the steps of `method` until its state is done, and return its result.

    Args:
        method: what steps.
        name: of the work, beside the bar and in the checkpoint.
        total: steps in all, where that is known.
        progress: show a bar on a terminal or in a notebook, from the second second on, with a forecast of the
            time (`progress_bar`); a text stands beside it in the place of the name.
        callback: called with the state after each step; not for steps that an earlier run has taken.
        checkpoint: file in which the state is kept, saved every minute, or less often where saving takes long:
            after a kill, the same call goes on there and ends at the same numbers. Removed at the end. Where the
            work depends on an operator that is spread over ranks, they all make this call, and decide together.
            A `SaveFile` of the caller's is taken as it is, with its own key.

    Raises:
        ValueError: the checkpoint belongs to other work; the message names what differs.
        OSError: it is a folder, or cannot be written.
        TypeError: something that the work depends on cannot be described.

    Cost: one product for each linear operator that the work depends on, at the first save and when a run goes on.
    """
    file = _file(name, method, callback, checkpoint)
    with progress_bar(name, total=total, progress=progress) as bar, around(bar.forecast):
        bar.forecast.foreseen = getattr(method, "foreseen", bar.forecast.foreseen)  # `init` may multiply, too
        state = method.init()
        if file is not None and (stored := file.load(_device(state))) is not None:
            state = _restored(state, stored)
            bar.begin(state.num_steps)
        if not hasattr(method, "foreseen"):
            bar.forecast.foreseen = lambda columns: _expected(method, state, total)
        while not state.done:
            before = state.num_steps
            state = method.step(state)
            if state.num_steps == before:  # it has only looked whether it is done
                continue
            bar.total = getattr(state, "end", total)
            if not bar.forecast.given:
                bar.expected = _expected(method, state, bar.total)
            bar.update()
            if not bar.disable:
                texts = (getattr(state, "status", ""), bar.forecast.text)
                bar.set_postfix_str(", ".join(filter(None, texts)), refresh=False)
            if callback is not None:
                callback(state)
            if file is not None and not state.done and file.due(state.num_steps):
                file.save(_plain(state))
    found = method.result(state)
    if file is not None:
        file.remove()
    return found


def _file(name: str, method: Any, callback: object, checkpoint: object) -> SaveFile | None:
    """Return the file of a checkpoint, or raise where that, or the callback, is none."""
    if callback is not None and not callable(callback):
        raise TypeError(f"callback is a function of the state, got {callback!r}")
    if checkpoint is None or isinstance(checkpoint, SaveFile):
        return checkpoint
    if not isinstance(checkpoint, str | Path | Checkpoint):
        raise TypeError(f"checkpoint is the path of a file, got {checkpoint!r}")
    return _open(checkpoint, Key(name, method.depends_on()))


def _expected(method: Any, state: Any, total: int | None) -> float | None:
    """Return the number of the last step, as known or as the method expects; None where nobody can tell."""
    if total is not None or not hasattr(method, "expected_steps"):
        return total
    return cast("float | None", method.expected_steps(state))


# -------------------------------------------------------------------------------------- the file
class Key:
    """What a file belongs to: texts, and numbers of operators.

    Args:
        name: of the work.
        depends_on: see `Method`.

    Attributes:
        operators: by name, those that the work depends on.
    """

    def __init__(self, name: str, depends_on: Mapping[str, Any]) -> None:
        if "generator" in depends_on and depends_on["generator"] is None:
            raise ValueError("a checkpoint keeps the state of the generator: pass generator=...")
        self.operators = {n: part for n, part in depends_on.items() if callable(getattr(part, "probe", None))}
        own = {n: described(part) for n, part in depends_on.items() if n not in self.operators}
        self._texts = {"work": name, **own}

    @cached_property
    def entries(self) -> dict[str, Any]:
        """Texts and products by name. Cost: a product for each operator, once."""
        products = {}
        for name, operator in self.operators.items():
            text = f"{operator.shape[0]} {operator.dtype} damping {operator.damping!r}"
            products[name] = (text, operator.probe(), torch.finfo(operator.dtype).eps ** 0.5)
        return self._texts | products

    def differs_in(self, stored: Mapping[str, Any]) -> list[str]:
        """Return the names of what is not the same in the entries of a file."""
        own = self.entries
        return sorted(n for n in {*stored, *own} if not _same(stored.get(n), own.get(n)))


def _same(stored: Any, own: Any) -> bool:
    if not (isinstance(stored, tuple) and isinstance(own, tuple)):
        return bool(stored == own)
    (text, product, tolerance), (own_text, own_product, _) = stored, own
    if text != own_text or product.shape != own_product.shape:
        return False
    return bool((product - own_product).norm() <= tolerance * own_product.norm())


class SaveFile:
    """The file of one piece of work. Ranks that work together decide together; the first of them writes and reads.

    Args:
        place: where it is, and how often it is saved.
        key: what it belongs to.
        ranks: the processes that have the same state.
    """

    def __init__(self, place: Checkpoint, key: Key, ranks: Ranks = Ranks()) -> None:  # noqa: B008  # it is frozen
        self.path, self.every, self.key, self.ranks = Path(place.path), place.every, key, ranks
        self._saved_at = time.monotonic()
        self._seconds_to_save = 0.0
        if ranks.size > 1:
            key.entries  # noqa: B018  # all ranks multiply

    def load(self, device: torch.device | None = None) -> dict[str, Any] | None:
        """Return what was saved; None when there is nothing. Tensors that were not on the CPU come to `device`.

        A file that cannot be read is renamed, with a warning: the work starts afresh, and nothing is lost if the
        file was no checkpoint.

        Raises:
            ValueError: the file belongs to other work.
        """
        return self.ranks.object_from_first(self._load(device) if self.ranks.is_first else None)

    def due(self, num_steps: int) -> bool:
        """Return whether to save after this step: a multiple of `every`, or a minute after the last save."""
        wait = max(SECONDS_BETWEEN_SAVES, self._seconds_to_save / MAX_SHARE)
        due = time.monotonic() - self._saved_at >= wait or (self.every is not None and num_steps % self.every == 0)
        return due if self.ranks.size == 1 else bool(self.ranks.from_first(torch.tensor(due, dtype=torch.int32)))

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the file by one with this state: tensors, numbers, strings, and lists and dicts of them.

        Where that fails, e.g. on a full disk, it is only told: what was computed is not lost for its copy.
        """
        began = time.monotonic()
        if self.ranks.is_first:
            with self._failure_told():
                content = encode({"key": self.key.entries, "state": dict(state)}, _HEADER)
                write_atomically(self.path, content)
        self._saved_at = time.monotonic()
        self._seconds_to_save = self._saved_at - began

    def remove(self) -> None:
        """Delete the file, if there is one: its work is done."""
        if self.ranks.is_first:
            with self._failure_told():
                self.path.unlink(missing_ok=True)
                remove_stale(self.path.parent, self.path.name, older_than=0)  # of a kill in the middle of a save

    @contextmanager
    def _failure_told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            warnings.warn(
                f"the checkpoint {self.path} is as it was before ({error.strerror or error}); the work goes on",
                CheckpointWarning,
                stacklevel=5,
            )

    def _load(self, device: torch.device | None) -> dict[str, Any] | None:
        check_place(self.path)
        try:
            content = decode(self.path.read_bytes(), _HEADER, device=device)
        except FileNotFoundError:
            return None
        except DamagedFileError as damage:
            aside = self.path.with_name(f"{self.path.name}.damaged")
            self.path.replace(aside)
            warnings.warn(
                f"{self.path} is no readable checkpoint ({damage}): it is now {aside.name}, and its work starts "
                "afresh.",
                CheckpointWarning,
                stacklevel=3,
            )
            return None
        if changed := self.key.differs_in(content["key"]):
            differ = "differ" if len(changed) > 1 else "differs"
            raise ValueError(
                f"{self.path} belongs to other work ({', '.join(changed)} {differ}): give each its own "
                "checkpoint, or delete it."
            )
        return cast("dict[str, Any]", content["state"])


class SaveFilesOfRanks(SaveFile):
    """Files of work whose vectors are cut up: each rank writes its part, <path>.<rank>-of-<ranks>.<0 or 1>.

    Two saves are kept in turns, so that a kill between two ranks' writes leaves one that all of them have. The
    same number of ranks goes on with it, each from a disk that it sees again.
    """

    def __init__(self, place: Checkpoint, key: Key, ranks: Ranks) -> None:
        super().__init__(place, key, ranks)
        self._num_saved = 0
        names = [f"{self.path.name}.{ranks.rank}-of-{ranks.size}.{turn}" for turn in (0, 1)]
        self._turns = [SaveFile(Checkpoint(self.path.with_name(name)), key) for name in names]

    def load(self, device: torch.device | None = None) -> dict[str, Any] | None:
        """Return this rank's part of the last save that all ranks have finished; None when there is none."""
        found = [turn.load(device) for turn in self._turns]
        mine = {state["save"]: state["state"] for state in found if state is not None}
        common = set.intersection(*map(set, self.ranks.gather(sorted(mine))))
        self._num_saved = max(common, default=0)
        return mine.get(self._num_saved)

    def save(self, state: Mapping[str, Any]) -> None:
        """Write this rank's part."""
        began = time.monotonic()
        self._num_saved += 1
        self._turns[self._num_saved % 2].save({"save": self._num_saved, "state": dict(state)})
        self._saved_at = time.monotonic()
        self._seconds_to_save = self._saved_at - began

    def remove(self) -> None:
        """Delete this rank's files."""
        for turn in self._turns:
            turn.remove()


def _open(place: str | Path | Checkpoint, key: Key) -> SaveFile:
    place = place if isinstance(place, Checkpoint) else Checkpoint(place)
    operator = next((each for each in key.operators.values() if each.ranks.size > 1), None)
    if operator is None:
        return SaveFile(place, key)
    in_parts = any(operator.ranks.gather(operator.num_rows != operator.shape[0]))
    return (SaveFilesOfRanks if in_parts else SaveFile)(place, key, operator.ranks)


# ------------------------------------------------------------------------------- states in files
def _plain(value: Any) -> Any:
    """Return what a file can hold of a state, or of a part of it."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if callable(getattr(value, "load_state_dict", None)):
        return value.state_dict()
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return value


def _restored(fresh: Any, stored: Any) -> Any:
    """Return the state that a file holds; what must stay the same object is taken from `fresh`, and changed."""
    if isinstance(fresh, torch.Generator):
        fresh.set_state(stored)
        return fresh
    if callable(getattr(fresh, "load_state_dict", None)):
        fresh.load_state_dict(stored)
        return fresh
    if is_dataclass(fresh) and not isinstance(fresh, type):
        parts = {name: _restored(getattr(fresh, name), part) for name, part in stored.items()}
        if getattr(fresh, "__dataclass_params__").frozen:  # noqa: B009
            return replace(fresh, **parts)
        for name, part in parts.items():
            setattr(fresh, name, part)
        return fresh
    if type(fresh) in (list, tuple) and len(fresh) == len(stored):
        return type(fresh)(_restored(own, part) for own, part in zip(fresh, stored, strict=True))
    if isinstance(fresh, dict) and fresh.keys() == stored.keys():
        return {name: _restored(own, stored[name]) for name, own in fresh.items()}
    return stored


def _device(value: Any) -> torch.device | None:
    """Return a device other than the CPU on which part of a state lies; None where there is none."""
    if isinstance(value, Tensor):
        return value.device if value.device.type != "cpu" else None
    if is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, list | tuple):
        parts = list(value)
    else:
        parts = list(value.values()) if isinstance(value, dict) else []
    return next((place for part in parts if (place := _device(part)) is not None), None)
