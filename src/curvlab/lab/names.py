"""Names for readers: one colour a method in all figures, and what a reader calls a task."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text

from curvlab.lab.reporting.plots import MARKERS, shades

# Colour is of methods: what has a hue in a figure is a method, in all figures the same one. Names are as `_plain`
# writes them; one that begins with a method's ("ginger, never clipped") is a variant of it. Of the first ten
# all but magenta are of Okabe & Ito (2008), without their yellow, too pale on white, and of Tol's muted scheme.
_METHODS: Mapping[str, tuple[str, ...]] = {
    "#0072B2": ("sgd", "momentum", "gradient descent"),
    "#D55E00": ("ngd",),
    "#009E73": ("ginger",),
    "#CC79A7": ("adam",),
    "#E69F00": ("qng",),
    "#56B4E9": ("momentum, clipped",),
    "#C4128E": ("exact", "direct", "dense solve"),
    "#882255": ("exact ngd",),
    "#8F8F2A": ("filter", "training filter"),
    "#332288": ("soap",),
    "#6A3A12": ("muon",),
    "#1B8A8A": ("lemma", "uniform direction"),
    "#0B6E0B": ("newton",),
    "#B769F2": ("cubic newton",),
    "#7B4FC9": ("lissa",),
    "#B39DDB": ("lissa.auto",),
    "#C1121F": ("cg", "conjugate gradient"),
    "#FF8F80": ("block cg",),
    "#0B2A5B": ("default",),
    "#726B00": ("chebyshev",),
    "#86C940": ("pbrf", "proximal bregman response"),
    "#00B0C8": ("influence",),
    "#1F4E79": ("ek fac", "k fac", "kronfluence ek fac", "dattri ek fac"),
    "#A0522D": ("unrolled",),
    "#D6CE00": ("source",),
    "#FE225F": ("trak",),
    "#FFB07C": ("gradient", "plain gradients"),
}
COLORS: Mapping[str, str] = {name: color for color, names in _METHODS.items() for name in names}
_LINES = ("-", "--", ":", "-.")  # of those in a figure that share a colour, and of those that have none


def styles_of(names: Iterable[Hashable]) -> dict[Hashable, dict[str, Any]]:
    """Return color and marker by name.

    Methods have those of `COLORS`, variants of one method its colour with another marker and another line, in
    whatever order they come. All else, settings, quantities, data, is no method and has no hue: shades of grey,
    each with its marker and line, from dark to bright in the order of the names, of numbers by size.
    """
    names = list(dict.fromkeys(names))
    known = {name: method for name in names if (method := method_of(name))}
    found: dict[Hashable, dict[str, Any]] = {}
    taken: dict[str, int] = {}
    for name in sorted(known, key=lambda name: (len(_plain(name)), _plain(name))):
        color = COLORS[known[name]]
        turn = taken[color] = taken.get(color, -1) + 1
        place = list(_METHODS).index(color)
        found[name] = {"color": color, "marker": MARKERS[(place + turn) % len(MARKERS)]}
        if turn:
            found[name]["linestyle"] = _LINES[turn % len(_LINES)]
    others: list[Any] = [name for name in names if name not in known]
    if all(isinstance(name, int | float | np.number) for name in others):
        others.sort()
    for place, (name, color) in enumerate(zip(others, shades(len(others)), strict=True)):
        found[name] = {"color": color, "marker": MARKERS[place % len(MARKERS)]}
        if place:
            found[name]["linestyle"] = _LINES[place % len(_LINES)]
    return {name: found[name] for name in names}


def style_of(label: str) -> dict[str, Any]:
    """Return color and marker of what stands alone: a method's own, else dark grey."""
    return styles_of([label])[label]


def method_of(name: Hashable) -> str:
    """Return the longest name in `COLORS` that a name begins with, "" where it begins with none."""
    stems = [stem for stem in COLORS if re.match(rf"{re.escape(stem)}(?![\w.])", _plain(name))]
    return max(stems, key=len, default="")


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
    **{"adam": "by Adam", "stage": "last stage alone", "faster": "at a larger rate"},
}


def reader_names(tasks: Iterable[str], *, whole: bool = False) -> dict[str, str]:
    """Return what a reader calls each task: "mlp-64-mnist-early-curvature-3000" is "MLP on MNIST, stopped early".

    Where two tasks would be called the same, both have their widths and numbers of examples, too; with `whole`,
    for pictures that stand beside others', all have. Names that are no task's labels stay as they are.
    """
    short = {task: _called(task, whole=whole) for task in tasks}
    names = list(short.values())
    return {task: name if names.count(name) == 1 else _called(task, whole=True) for task, name in short.items()}


_KEY = re.compile(rf"(?<![\w-])(?:exact-ngd|(?:{'|'.join(_MODELS)})[a-z0-9]*)(?:-[a-z0-9]+(?:\.\d+)?)+(?![\w-])")


def for_readers(texts: Iterable[str], *, whole: bool = False) -> Callable[[str], str]:
    """Return what writes readers' names for the tasks' labels in a text; `texts` are all that stand together."""
    names = reader_names(sorted({key for text in texts for key in _KEY.findall(text)}), whole=whole)
    return lambda text: _KEY.sub(lambda found: names[found[0]], text)


def name_tasks(drawing: Figure) -> None:
    """Write readers' names for the tasks' labels in all texts of a figure: titles, legends, labels, ticks."""
    axes = [axis for ax in drawing.axes for axis in (ax.xaxis, ax.yaxis)]
    ticks = [(axis, [label.get_text() for label in axis.get_ticklabels()]) for axis in axes]
    texts = [each for each in drawing.findobj(Text) if isinstance(each, Text)]
    told = for_readers(
        [*(each.get_text() for each in texts), *(label for _, own in ticks for label in own)], whole=True
    )
    for axis, labels in ticks:
        if (names := [told(label) for label in labels]) != labels:
            axis.set_ticks(axis.get_ticklocs(), names)
    for each in texts:
        if (text := told(each.get_text())) != each.get_text():
            each.set_text(text)


def _called(task: str, *, whole: bool) -> str:
    label, *decay = task.replace("exact-ngd-", "mlp-").split("-decay-")
    model = next((key for key in _MODELS if re.match(rf"{key}(?![a-z])", label)), "")
    data = next((key for key in _DATA if re.search(rf"(^|-){key}(-|$)", label)), "")
    if not data or not model:
        return task
    before, _, after = label.partition(data)
    kind, *rest = before.removesuffix("-").split("-")
    name = _MODELS[model] + (kind.removeprefix(model) if _MODELS[model].endswith("-") else "")
    widths, size = (
        "-".join(filter(str.isdigit, rest)) if "layer" not in before else "",
        re.search(r"(?<!curvature)-(\d+)(?!-epochs)(?=-|$)", after),
    )
    if whole:
        name = " ".join([name, widths, *(each for each in rest if each in {"tanh", "relu"})])
    of = f"{int(size[1]):,} of " if whole and size else ""
    states = [told for key, told in _STATES.items() if f"-{key}-" in f"-{label}-"]
    states += [f"decay {value}" for value in decay]
    return ", ".join([f"{name.rstrip()} on {of}{_DATA[data]}", *states])
