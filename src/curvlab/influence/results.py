"""What results with a score for each training point share: the best and the worst, tables, pictures, files."""

from __future__ import annotations

import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from curvlab.arguments import whole
from curvlab.described import described, fingerprint
from curvlab.files import decode, encode, write_atomically
from curvlab.problem import Data, Loss, Problem
from curvlab.problem.closed_forms import BinaryCrossEntropy, CrossEntropy
from curvlab.shown import Shown, new_figure
from curvlab.training.history import DataProbe

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HELPFUL, HARMFUL = "#0072b2", "#d55e00"
_MOST_ROWS = 4
_Row = list[tuple[int, float]]  # points and their scores, the most helpful first


@dataclass(frozen=True)
class Origin:
    """What scores are of, taken when they were computed: `PointScores.check` compares it.

    Attributes:
        model: hash of the model's parameters and buffers.
        loss: see `described`.
        data: what tells the training examples, and their order, from others.
        settings: loss, damping, curvature and solver in words.
        unit: of the measured loss.
    """

    model: str
    loss: str
    data: DataProbe
    settings: dict[str, str]
    unit: str

    parts: ClassVar[Mapping[str, type]] = {"data": DataProbe}

    @classmethod
    def of(cls, problem: Problem, *, measured: bool = False, **settings: object) -> Origin:
        """Describe the problem, and the settings; `measured`: scores are of a measurement, not of the loss.

        Cost: a hash of the parameters, and 32 examples read twice.
        """
        model = problem.model
        unit = "nats" if isinstance(problem.loss, CrossEntropy | BinaryCrossEntropy) else "units of the loss"
        return cls(
            fingerprint([*model.parameters(), *model.buffers()]),
            _described(problem.given_loss),
            _probe(problem),
            {name: _in_words(value) for name, value in {"loss": problem.given_loss, **settings}.items()},
            "units of the measurement" if measured else unit,
        )

    def differs_from(self, problem: Problem) -> list[str]:
        """Return what is another there, in words."""
        other = Origin.of(problem)
        examples = self.data.differs(other.data, (problem.dtype,))
        found = {
            "parameters": self.model != other.model,
            "loss": self.loss != other.loss,
            f"training examples or order of them ({examples})": bool(examples),
        }
        return [name for name, differs in found.items() if differs]


def _probe(problem: Problem) -> DataProbe:
    """Read up to 32 examples; of a stream its first batch, since reading single examples would hold all of it."""
    if problem.data.reads_single:
        return DataProbe.of(lambda index: problem.data.select(index)[0], problem.num_examples)
    first = next(iter(problem.data))
    return replace(DataProbe.of(lambda _: first, 1), num_examples=problem.num_examples)


def _described(loss: Loss) -> str:
    try:
        return described(loss)
    except TypeError:  # it holds a lock, or the like
        return type(loss).__name__


def _in_words(value: object) -> str:
    """Return a setting as text; of a solver its class and its plain settings."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if not is_dataclass(value) or isinstance(value, type):
        return value.__name__ if isinstance(value, types.FunctionType) else str(value)
    own = {field.name: getattr(value, field.name) for field in fields(value) if field.repr}
    kept = [f"{n}={_in_words(v)}" for n, v in own.items() if isinstance(v, int | float | str) or is_dataclass(v)]
    return f"{type(value).__name__}({', '.join(kept)})"


class PointScores(Shown):
    """A result with `scores`, (rows, K), of K training points, their indices `points`, and its `origin`."""

    scores: Tensor
    points: Tensor | None
    origin: Origin | None

    parts: ClassVar[Mapping[str, type]]  # fields that are records, for files
    best_is_lowest: ClassVar[bool] = True  # whether `top` begins with the lowest score
    meaning: ClassVar[tuple[str, str]] = ("helps", "harms")  # of a negative score, and of a positive one
    row: ClassVar[str] = "test"  # what a row is of, in tables

    @property
    def sign_and_unit(self) -> str:
        """What a score says: "negative: helps; nats per unit of weight"."""
        return f"negative: {self.meaning[0]}; {self.unit} per unit of weight"

    @property
    def unit(self) -> str:
        """Of the measured loss."""
        return "units of the loss" if self.origin is None else self.origin.unit

    def row_title(self, row: int) -> str:
        """Return what stands over a row of a picture."""
        return f"test example {row}"

    def top(self, k: int, *, harmful: bool = False) -> Tensor:
        """Return each row's k most helpful points, the lowest scores first, (rows, k).

        Indices of training examples; of candidates, and over processes, columns of the scores. `harmful`: the
        other end instead.
        """
        return self.points_of(self._columns(k, harmful=harmful))

    def _columns(self, k: int, *, harmful: bool = False) -> Tensor:
        if not whole("k", k) <= self.scores.shape[1]:
            raise ValueError(f"k must be from 1 to the number of points, {self.scores.shape[1]}, got {k}")
        return self.scores.topk(k, dim=1, largest=harmful == self.best_is_lowest).indices

    def points_of(self, columns: Tensor) -> Tensor:
        """Return which training examples columns of the scores belong to; of candidates the columns."""
        return columns if self.points is None else self.points.to(columns.device)[columns]

    def ends(self, k: int) -> Tensor:
        """Return the columns of each row's k points at either end, (rows, 2 k or all), the most helpful first."""
        best = min(whole("k", k), self.scores.shape[1])
        worst = min(k, self.scores.shape[1] - best)
        ends = [self._columns(best)] + ([self._columns(worst, harmful=True).flip(1)] if worst else [])
        return torch.cat(ends, dim=1)

    def table(self, k: int = 5) -> pd.DataFrame:
        """Return a data frame of each row's k points at either end, the most helpful first; needs pandas.

        Columns: the row, the point, its score, what its sign says, and the relative residual of the system behind
        the score, which is its error; nan where there is no system. Where there are fewer than 2 k points, each
        is there once. `attrs["unit"]` holds sign and unit.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("table needs pandas: pip install pandas; top(k) does without") from error
        columns = self.ends(k)
        scores = self.scores.gather(1, columns).flatten().tolist()
        signs = [self.meaning[score > 0] if score else "neither" for score in scores]
        rows = torch.arange(len(columns)).repeat_interleave(columns.shape[1]).tolist()
        found = {
            self.row: rows,
            "point": self.points_of(columns).flatten().tolist(),
            "score": scores,
            "sign": signs,
        }
        for name, values in self._beside().items():
            found[name] = values.to(columns.device).expand_as(self.scores).gather(1, columns).flatten().tolist()
        table = pd.DataFrame(found)
        table.attrs["unit"] = self.sign_and_unit
        return table

    def _beside(self) -> dict[str, Tensor]:
        """Return further columns of `table`, by name: (rows, K), or what expands to it."""
        return {"residual": torch.full((1, 1), torch.nan)}

    def plot(
        self,
        k: int = 5,
        *,
        tests: Sequence[int] | None = None,
        train: Data | None = None,
        test: Data | None = None,
        describe: Callable[[Any], Any] | None = None,
    ) -> Figure:
        """Draw each row's k points at either end, the most helpful and the most harmful; needs matplotlib.

        Args:
            k: points of each kind; fewer where there are not so many.
            tests: numbers of rows, of test examples; None: the first four.
            train: the training set, to show the points themselves: images as images, anything else as text. None:
                bars of the scores.
            test: the test set, likewise.
            describe: makes of an example what is shown, a text or an image (H, W) or (H, W, 3): for texts of a
                language model `lambda row: tokenizer.decode(row["input_ids"])`. None: its inputs.

        Returns:
            The figure; `figure.savefig(...)` keeps it.
        """
        return _draw_top(self, k, tests=tests, train=train, test=test, describe=describe)

    # -------------------------------------------------------------------------------- the file
    def save(self, path: str | Path) -> None:
        """Write all of it to a file, atomically, with what it is of: model, loss, order of the data, settings."""
        write_atomically(Path(path), encode(_plain(self), _header(type(self))))

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: nn.Module | Problem | None = None,
        loss: Loss | None = None,
        train: Data | None = None,
    ) -> Self:
        """Return what `save` wrote, on the CPU.

        Args:
            path: of the file.
            model: with loss and train, or a `Problem` in their place: what the scores have to be of (`check`).
                None: nothing is compared.
            loss: likewise.
            train: likewise.

        Raises:
            ValueError: the scores are of another model or loss, or of training examples in another order.
            DamagedFileError: the file is no such thing.
        """
        entry = decode(Path(path).read_bytes(), _header(cls))
        found = _made(cls, entry)
        if model is not None:
            try:
                found.check(model, loss, train)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
        return found

    def check(self, model: nn.Module | Problem, loss: Loss | None = None, train: Data | None = None) -> None:
        """Raise a ValueError unless the scores are of this model and loss, and of these examples in this order."""
        if self.origin is None:
            raise ValueError("these scores do not say what they are of: they come from several processes")
        if different := self.origin.differs_from(Problem.of(model, loss, train)):
            raise ValueError(
                f"the scores are of other {' and '.join(different)}: compute them for this model and data"
            )


def _header(kind: type) -> str:
    return f"curvlab-{kind.__name__}-2"


def _plain(value: Any) -> Any:
    """Return tensors, numbers and texts, and dicts of them in the place of records."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return value


def _made(kind: type[Any], entry: Mapping[str, Any]) -> Any:
    """Return the record again."""
    parts = getattr(kind, "parts", {})
    return kind(**{n: _made(parts[n], v) if n in parts and v is not None else v for n, v in entry.items()})


# ------------------------------------------------------------------------------------ the picture
def _draw_top(
    result: PointScores,
    k: int,
    *,
    tests: Sequence[int] | None,
    train: Data | None,
    test: Data | None,
    describe: Callable[[Any], Any] | None,
) -> Figure:
    """Return the figure of `PointScores.plot`, which says what the arguments are."""
    num_rows = len(result.scores)
    chosen = range(min(_MOST_ROWS, num_rows)) if tests is None else tests
    rows = [whole("a number of tests", row, least=0) for row in chosen]
    if not rows or min(rows) < 0 or max(rows) >= num_rows:
        raise ValueError(f"tests must be numbers of test examples from 0 to {num_rows - 1}, got {rows}")
    columns = result.ends(k)
    points, scores = result.points_of(columns)[rows].tolist(), result.scores.gather(1, columns)[rows].tolist()
    shown = [list(zip(*of_row, strict=True)) for of_row in zip(points, scores, strict=True)]
    if train is None:
        return _bars(result, rows, shown)
    return _examples(result, rows, shown, train, test, describe=describe)


def _bars(result: PointScores, rows: Sequence[int], shown: Sequence[_Row]) -> Figure:
    figure = new_figure(figsize=(6.5, (0.5 + 0.22 * len(shown[0])) * len(rows)), layout="constrained")
    for place, (row, found) in enumerate(zip(rows, shown, strict=True), start=1):
        ax = figure.add_subplot(len(rows), 1, place)
        colors = [HELPFUL if score < 0 else HARMFUL for _, score in found]
        ax.barh(range(len(found)), [score for _, score in found], color=colors)
        ax.set_yticks(range(len(found)), [str(point) for point, _ in found], fontsize=7)
        ax.invert_yaxis()
        ax.axvline(0, color="black", linewidth=0.6)
        ax.set_title(result.row_title(row), fontsize=8, loc="left")
    ax.set_xlabel(result.sign_and_unit, fontsize=8)
    figure.supylabel("training example", fontsize=8)
    return figure


def _examples(
    result: PointScores,
    rows: Sequence[int],
    shown: Sequence[_Row],
    train: Data,
    test: Data | None,
    *,
    describe: Callable[[Any], Any] | None,
) -> Figure:
    columns = 1 + len(shown[0])
    figure = new_figure(figsize=(1.3 * columns, 1.75 * len(rows)), layout="constrained")
    for place, (row, found) in enumerate(zip(rows, shown, strict=True)):
        ax = figure.add_subplot(len(rows), columns, place * columns + 1)
        _show(ax, None if test is None else _example(test, row), describe, result.row_title(row), "black")
        for number, (point, score) in enumerate(found, start=2):
            ax = figure.add_subplot(len(rows), columns, place * columns + number)
            color = HELPFUL if score < 0 else HARMFUL
            _show(ax, _example(train, point), describe, f"{point}: {score:.2g}", color)
    figure.suptitle(f"{result.sign_and_unit} (blue: negative, orange: positive)", fontsize=8)
    return figure


def _example(data: Any, index: int) -> Any:
    """Return one example's inputs, or all of it where it is no pair."""
    if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        return data[0][index]
    try:
        example = data[index]
    except (TypeError, KeyError):
        raise TypeError(
            f"plot shows examples by their number, which {type(data).__name__} does not know: pass the pair of "
            "tensors, or the data set that the loader reads"
        ) from None
    return example[0] if isinstance(example, tuple | list) and len(example) == 2 else example


def _show(ax: Axes, example: Any, describe: Callable[[Any], Any] | None, title: str, color: str) -> None:
    ax.set_title(title, fontsize=7, color=color)
    ax.set_axis_off()
    if example is None:
        return
    found = example if describe is None else describe(example)
    image = None if isinstance(found, str) else _image(found)
    if image is not None:
        ax.imshow(image.numpy(), cmap=None if image.ndim == 3 else "gray", interpolation="nearest")
        return
    text = found if isinstance(found, str) else str(found.tolist() if isinstance(found, Tensor) else found)
    ax.text(0.5, 0.5, textwrap.fill(textwrap.shorten(text, 90), 16), fontsize=5.5, ha="center", va="center")


def _image(example: Any) -> Tensor | None:
    """Return an image's values from 0 to 1, (H, W) or (H, W, 3); None for what is no image."""
    if not isinstance(example, Tensor):
        try:
            example = torch.as_tensor(example)
        except (TypeError, ValueError, RuntimeError):
            return None
    values = example.detach().float().cpu()
    if values.ndim == 3 and values.shape[0] in (1, 3):
        values = values.movedim(0, -1)
    if values.ndim == 3 and values.shape[-1] == 1:
        values = values[..., 0]
    if values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[-1] != 3):
        return None
    low, high = values.min(), values.max()
    return (values - low) / (high - low).clamp(min=1e-12)
