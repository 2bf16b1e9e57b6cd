"""What influence looks like: the most helpful and most harmful training examples of each test example."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvlab.problem import Data
from curvlab.shown import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvlab.influence.scores import Influence

HELPFUL, HARMFUL = "#0072b2", "#d55e00"
_MOST_ROWS = 4


def draw_top(
    result: Influence,
    k: int,
    *,
    tests: Sequence[int] | None,
    train: Data | None,
    test: Data | None,
    describe: Callable[[Any], Any] | None,
) -> Figure:
    """Return the figure of `Influence.plot`, which says what the arguments are."""
    num_tests, num_points = result.scores.shape
    rows = list(range(min(_MOST_ROWS, num_tests)) if tests is None else tests)
    if not rows or min(rows) < 0 or max(rows) >= num_tests:
        raise ValueError(f"tests must be numbers of test examples from 0 to {num_tests - 1}, got {rows}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    # Where there are fewer than 2 k points, none is shown as helpful and as harmful.
    helpful = result.top(min(k, num_points))
    harmful = result.top(min(k, num_points - helpful.shape[1]), harmful=True) if num_points > k else helpful[:, :0]
    lowest, highest = (result.scores.sort(dim=1, descending=way).values for way in (False, True))
    shown = [
        [(int(p), float(s)) for p, s in zip(points[row], scores[row], strict=False)]
        for row in rows
        for points, scores in ((helpful, lowest), (harmful, highest))
    ]
    pairs = list(zip(rows, shown[::2], shown[1::2], strict=True))
    if train is None:
        return _bars(pairs)
    return _examples(pairs, train, test, describe)


def _bars(pairs: Sequence[tuple[int, list[tuple[int, float]], list[tuple[int, float]]]]) -> Figure:
    most = max(len(good) + len(bad) for _, good, bad in pairs)
    figure = new_figure(figsize=(6.5, (0.5 + 0.22 * most) * len(pairs)), layout="constrained")
    for place, (row, good, bad) in enumerate(pairs, start=1):
        ax = figure.add_subplot(len(pairs), 1, place)
        found = good + bad[::-1]
        colors = [HELPFUL if score < 0 else HARMFUL for _, score in found]
        ax.barh(range(len(found)), [score for _, score in found], color=colors)
        ax.set_yticks(range(len(found)), [str(point) for point, _ in found], fontsize=7)
        ax.invert_yaxis()
        ax.axvline(0, color="black", linewidth=0.6)
        ax.set_title(f"test example {row}", fontsize=8, loc="left")
    ax.set_xlabel("influence per unit of weight (negative: the point lowers the test loss)", fontsize=8)
    figure.supylabel("training example", fontsize=8)
    return figure


def _examples(
    pairs: Sequence[tuple[int, list[tuple[int, float]], list[tuple[int, float]]]],
    train: Data,
    test: Data | None,
    describe: Callable[[Any], Any] | None,
) -> Figure:
    columns = 1 + max(len(good) + len(bad) for _, good, bad in pairs)
    figure = new_figure(figsize=(1.3 * columns, 1.75 * len(pairs)), layout="constrained")
    for place, (row, good, bad) in enumerate(pairs):
        ax = figure.add_subplot(len(pairs), columns, place * columns + 1)
        _show(ax, None if test is None else _example(test, row), describe, f"test {row}", "black")
        for number, (point, score) in enumerate(good + bad[::-1], start=2):
            ax = figure.add_subplot(len(pairs), columns, place * columns + number)
            color = HELPFUL if score < 0 else HARMFUL
            _show(ax, _example(train, point), describe, f"{point}: {score:.2g}", color)
    figure.suptitle("negative influence (blue) lowers the test loss, positive (orange) raises it", fontsize=8)
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
        ax.imshow(image, cmap=None if image.ndim == 3 else "gray", interpolation="nearest")
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
