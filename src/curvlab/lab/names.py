"""Names for readers: one colour a method in all figures, and what a reader calls a task."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from curvlab.lab.reporting.plots import MARKERS, PALETTE

# A method has one colour in all figures. Names as `_plain` writes them; a name that begins with one of these
# ("ginger, never clipped") is a variant of it. The palette's colours come first: they are those of the optimizers,
# and of settings, gaps, quantities, libraries and methods that stand beside none of these. Each of the others, of
# the other optimizers, the solvers and the scores, is one method's alone.
_METHODS = (
    ("sgd", "momentum", "gradient descent", "curvlab", "proximity"),
    ("ngd", "linearisation", "linearised", "curvlinops"),
    ("ginger", "non convergence", "llc", "δ = 0.1", "kronfluence"),
    ("adam", "solver"),
    ("qng", "warm", "δ = 1", "devinterp"),
    ("momentum, clipped", "the same without curvature", "ginger without curvature", "cold", "δ = 0.01"),
    ("direct", "exact", "dense solve", "newton", "printed", "random"),
    ("exact ngd", "tr(h)", "trace", "dattri"),
    ("filter", "training filter", "σ = 0", "pyhessian"),
    ("soap", "two stage", "wbic", "pydvl"),
)
_OWN = {
    "muon": "#5F3B1E",
    **dict.fromkeys(("uniform direction", "lemma", "δ = 0"), "#1B8A8A"),
    **dict.fromkeys(("cubic newton", "moving average"), "#9C9C9C"),
    **{"lissa": "#7B4FC9", "lissa.auto": "#B39DDB"},
    **dict.fromkeys(("cg", "conjugate gradient"), "#C1121F"),
    **{"block cg": "#FF8F80", "default": "#0B2A5B", "chebyshev": "#7D6E4A"},
    **dict.fromkeys(("pbrf", "proximal bregman response"), "#86C940"),
    "influence": "#00B0C8",
    **dict.fromkeys(("ek fac", "k fac"), "#3E5C76"),
    **{"unrolled": "#A0522D", "source": "#D6CE00", "trak": "#7A7A7A"},
    **dict.fromkeys(("gradient", "plain gradients"), "#FFB07C"),
}
COLORS: Mapping[str, str] = {
    **{name: color for color, names in zip(PALETTE, _METHODS, strict=True) for name in names},
    **_OWN,
}
_COLORS = tuple(dict.fromkeys(COLORS.values()))
_LINES = ("-", "--", ":", "-.")  # of those in a figure that share a colour: a method and its variants


def styles_of(names: Iterable[Hashable]) -> dict[Hashable, dict[str, Any]]:
    """Return color and marker by name; the order of the names does not matter.

    Methods have those of `COLORS`, variants of one method its colour with another marker and another line. Numbers
    go from dark to bright as they grow. Other names take a place of the palette by their letters, or the next
    that is free.
    """
    names = list(dict.fromkeys(names))
    numbers = [name for name in names if isinstance(name, int | float | np.number) and not isinstance(name, bool)]
    if 1 < len(numbers) == len(names):
        shades, places = mpl.colormaps["viridis"], np.argsort(np.argsort(np.array(numbers, dtype=float))).tolist()
        looks = [(to_hex(shades(0.85 * place / max(places))), MARKERS[place % len(MARKERS)]) for place in places]
        return {name: {"color": look[0], "marker": look[1]} for name, look in zip(names, looks, strict=True)}
    known = {name: place for name in names if (place := _place(_plain(name))) is not None}
    found: dict[Hashable, dict[str, Any]] = {}
    taken: dict[int, int] = {}
    for name in sorted(names, key=lambda name: (name not in known, len(_plain(name)), _plain(name))):
        place = known.get(name, -1)
        if place < 0:
            first = zlib.crc32(_plain(name).encode())
            order = [(first + step) % len(PALETTE) for step in range(len(PALETTE))]
            place = min(order, key=lambda each: taken.get(each, -1))
        turn = taken[place] = taken.get(place, -1) + 1
        found[name] = {"color": _COLORS[place], "marker": MARKERS[(place + turn) % len(MARKERS)]}
        if turn:
            found[name]["linestyle"] = _LINES[turn % len(_LINES)]
    return {name: found[name] for name in names}


def style_of(label: str) -> dict[str, Any]:
    """Return color and marker of what stands alone: a method's own, else the palette's first."""
    return styles_of([label])[label] if _place(_plain(label)) is not None else {"color": PALETTE[0], "marker": "o"}


def _place(name: str) -> int | None:
    """Return the place among the colours of the longest known method that a name begins with."""
    stems = [stem for stem in COLORS if re.match(rf"{re.escape(stem)}(?![\w.])", name)]
    return _COLORS.index(COLORS[max(stems, key=len)]) if stems else None


def _plain(name: Hashable) -> str:
    return str(name).lower().replace("_", " ").replace("-", " ")


# ------------------------------------------------------------------------------------ tasks
_MODELS = {
    **{"mlp": "MLP", "ffnn": "MLP", "convnet": "ConvNet", "lenet5": "LeNet-5", "lenet": "LeNet", "opt": "OPT"},
    **{"alexnet": "AlexNet", "vgg": "VGG-", "resnet": "ResNet-", "autoencoder": "autoencoder", "t5": "T5"},
    **{"logistic": "logistic regression", "llama": "Llama", "gpt2": "GPT-2"},
}
_DATA = {
    **{"fashion-mnist": "FashionMNIST", "mnist": "MNIST", "digits": "digits", "concrete": "Concrete"},
    **{"cifar100": "CIFAR-100", "cifar10": "CIFAR-10", "energy": "Energy", "breast-cancer": "breast cancer"},
    **{"pima-diabetes": "Pima diabetes", "diabetes": "diabetes", "ptb": "Penn Treebank", "xsum": "XSum"},
    **{"documentation": "documentation", "imagenet": "ImageNet", "openwebtext2": "OpenWebText"},
}
_STATES = {
    **{"early": "stopped early", "overfitted": "overfitted", "noisy": "noisy labels"},
    **{"1-layer": "1 hidden layer", "2-layers": "2 hidden layers", "100-epochs": "100 epochs"},
    **{"adam": "by Adam", "stage": "last stage alone"},
}


def reader_names(tasks: Iterable[str]) -> dict[str, str]:
    """Return what a reader calls each task: "mlp-64-mnist-early-curvature-3000" is "MLP on MNIST, stopped early".

    Where two tasks would be called the same, both have their widths and numbers of examples, too. Names that are
    no task's labels stay as they are.
    """
    short = {task: _called(task, whole=False) for task in tasks}
    names = list(short.values())
    return {task: name if names.count(name) == 1 else _called(task, whole=True) for task, name in short.items()}


_KEY = re.compile(rf"(?<![\w-])(?:exact-ngd|(?:{'|'.join(_MODELS)})[a-z0-9]*)(?:-[a-z0-9]+)+(?![\w-])")


def for_readers(texts: Iterable[str]) -> Callable[[str], str]:
    """Return what writes readers' names for the tasks' labels in a text; `texts` are all that stand together."""
    names = reader_names(sorted({key for text in texts for key in _KEY.findall(text)}))
    return lambda text: _KEY.sub(lambda found: names[found[0]], text)


def name_tasks(drawing: Figure) -> None:
    """Write readers' names for the tasks' labels in all texts of a figure: titles, legends, labels, ticks."""
    axes = [axis for ax in drawing.axes for axis in (ax.xaxis, ax.yaxis)]
    ticks = [(axis, [label.get_text() for label in axis.get_ticklabels()]) for axis in axes]
    texts = [each for each in drawing.findobj(Text) if isinstance(each, Text)]
    told = for_readers([*(each.get_text() for each in texts), *(label for _, own in ticks for label in own)])
    for axis, labels in ticks:
        if (names := [told(label) for label in labels]) != labels:
            axis.set_ticks(axis.get_ticklocs(), names)
    for each in texts:
        if (text := told(each.get_text())) != each.get_text():
            each.set_text(text)


def _called(task: str, *, whole: bool) -> str:
    label = task.replace("exact-ngd-", "mlp-")
    model = next((key for key in _MODELS if re.match(rf"{key}(?![a-z])", label)), "")
    data = next((key for key in _DATA if re.search(rf"(^|-){key}(-|$)", label)), "")
    if not data or not model:
        return task
    before, _, after = label.partition(data)
    kind, *rest = before.removesuffix("-").split("-")
    name = _MODELS[model] + (kind.removeprefix(model) if _MODELS[model].endswith("-") else "")
    widths, size = "-".join(filter(str.isdigit, rest)), re.search(r"-(\d+)(?!-epochs)(?=-|$)", after)
    if whole:
        name = " ".join([name, widths, *(each for each in rest if each in {"tanh", "relu"})])
    of = f"{int(size[1]):,} of " if whole and size else ""
    states = [told for key, told in _STATES.items() if f"-{key}-" in f"-{label}-"]
    return ", ".join([f"{name.rstrip()} on {of}{_DATA[data]}", *states])
