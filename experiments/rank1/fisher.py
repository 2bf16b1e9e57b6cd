"""The Fisher preconditioner: bounds on ‖∇²f - F‖, and steps to ε against K(ε) (Semenov 2025).

make rank1-fisher PRESET=smoke|embedded|laptop|paper ARGS="num_seeds=5"

Bounds: dense ∇²f and F of small networks, random and trained, with L measured where they stand (the largest
spectral norm of any output's Hessian, example by example), which is the hardest test. The lemma on ‖∇²f - F‖
squares the norm on one side only, which cannot hold for every scale of f; the softmax bound σ <= 2 f lacks L.

Rates: perceptrons, whose L and M are known for all parameters, by FisherNewton with the α_k rules of the slides;
those with softplus are convex, as the lemmas ask, with tanh they are not. For softmax also the rule as printed,
without L: on the parabola, convex with L = 20, it cycles for ever, and the rule with L arrives. R, which the
slides leave undefined, is the largest (f - f*) / ‖∇f‖ on the path, the least for which the lemma's proof works.

Everything is computed for mean losses: under f -> c f with M, σ, ε times c no step changes, and no bound.
`squared` in bounds.csv is in the slides' scale, ½ Σ r² and Σ -log p (printed without its -log).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torch import Tensor
from torch.func import functional_call, hessian
from torch.nn import functional
from torch.optim import Optimizer

from curvlab.lab import Computed, Run, Target, panels, plots, unit
from curvlab.optim import CubicNewton, FisherNewton, steps_bound
from curvlab.problem.own_losses import output_loss
from curvlab.training import train
from experiments.rank1.descent import Trace, descend, steps_panel
from experiments.rank1.objectives import (
    LOSSES,
    NetworkObjective,
    convex_parabola,
    neural_network,
    parabola,
    perceptron,
)
from experiments.shared.task import Task

TARGET = Target(
    __name__,
    title="The Fisher preconditioner",
    paper={
        "bounds.csv:model": "any, outputs L-smooth",
        "data.num_train": "S",
        "num_seeds": "none",
        "max_steps": "K(ε)",
    },
    digits={"bounds": 12},  # the parabolas attain the bounds, and six digits could put a ratio above 1
    curves=("table: gap over step by objective, method",),
)
Row = dict[str, Any]
PARABOLA_START = 0.06
METHODS = ("lemma", "lemma as printed", "σ = 0", "cubic Newton")  # the second for softmax alone
NUM_RECORDED = 50
FLOOR = 1e-10  # gradient norm at which the runs stop


class Recipe(NamedTuple):
    """How an objective is made: perceptrons by scale, activation and noise; a parabola by its curvature."""

    kind: str
    scale: float = 1.0
    activation: str = "tanh"
    noise: float = 0.0
    curvature: float | None = None

    def make(self, generator: torch.Generator) -> NetworkObjective:
        """Return the objective, its data and start drawn from the generator."""
        if self.curvature is not None:
            return convex_parabola(curvature=self.curvature, start=PARABOLA_START)
        settings = {"scale": self.scale, "activation": self.activation, "noise": self.noise}
        return perceptron(self.kind, **settings, generator=generator)  # type: ignore[arg-type]  # by name


RECIPES = {
    "least squares, f* = 0": Recipe("least squares"),
    "least squares, noisy": Recipe("least squares", noise=0.5),
    "least squares, convex": Recipe("least squares", 3.0, "softplus", 0.5),
    "softmax, L = 2.3": Recipe("softmax", 3.0, "tanh", 0.2),
    "softmax, convex": Recipe("softmax", 3.0, "softplus"),
    "softmax, linear (L = 0)": Recipe("softmax", 1.0, "identity", 0.2),
    "softmax, parabola (L = 20)": Recipe("softmax", curvature=20.0),
}


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table` (curves), `bounds`, one row for each (model, state, seed), its `summary`, and `rates`.

    Reads `tasks` (networks), `scales` of perceptrons, κ of the `parabola`, `num_seeds`; `rate_objectives`,
    `max_steps` and `epsilons` of the rates.
    """
    networks = [row for task in Task.each(run, cfg) for row in network_rows(task)]
    bounds = pd.DataFrame(networks + [row for kind in LOSSES for row in constructed_rows(run, cfg, kind)])
    curves, rates = rate_rows(run, cfg)
    run.note(seeds=list(range(cfg.num_seeds)))
    return {
        "table": pd.DataFrame(curves),
        "bounds": bounds,
        "rates": pd.DataFrame(rates),
        "summary": summary(bounds),
    }


# ------------------------------------------------------------------------------------ bounds
def network_rows(task: Task) -> list[Row]:
    """Return the gap of a task's network, random and trained, for each seed."""
    if task.splits.task == "binary":
        raise ValueError(
            f"data={task.splits.name} has one output for two classes; softmax needs one for each class."
        )
    known = {name: task.settings.get(name) for name in ("model", "training", "pooling", "seed_name")}
    return [
        {"model": task.label}
        | _network_gap(task.run, task, data=task.splits.checksum, **known, state=state, number=seed)
        for seed in range(task.settings.num_seeds)
        for state in ("random", "trained")
    ]


@unit("rank1/fisher-gap", version=1, about="gap of {seed_name}, {state}, seed {number}")
def _network_gap(run: Run, task: Task, /, *, state: str, number: int, pooling: int | None, **key: Any) -> Row:
    inputs, targets = task.pair()
    if pooling is not None:  # few parameters, so that ∇²f can be dense
        inputs = functional.adaptive_avg_pool2d(inputs, pooling).flatten(1)
    kind = "least squares" if task.splits.task == "regression" else "softmax"
    small = dataclasses.replace(task, splits=dataclasses.replace(task.splits, input_shape=inputs.shape[1:]))
    model = small.build(task.generator("network", number))
    if state == "trained":
        settings = {str(name): value for name, value in task.settings.training.items()}
        train(model, LOSSES[kind](), (inputs, targets), **settings, generator=task.generator("training", number))
    pair = (inputs.double(), targets.double() if targets.is_floating_point() else targets)
    return _row(neural_network(model.double(), pair, LOSSES[kind](), name=kind), (kind, state, number))


def constructed_rows(run: Run, cfg: DictConfig, kind: str) -> list[Row]:
    """Return the gap of perceptrons for each seed, of the parabola, and of a model that is linear (L = 0)."""
    rows = []
    for seed in range(cfg.num_seeds):
        for scale in cfg.scales:
            generator = run.generator("perceptron", kind, seed)
            objective = perceptron(kind, scale=scale, activation="tanh", noise=0.5, generator=generator)
            for parameter in objective.parameters:
                parameter.data *= 3
            rows.append({"model": f"perceptron × {scale:g}, {kind}", **_row(objective, (kind, "random", seed))})
    objective = parabola(kind, curvature=cfg.parabola)
    rows.append({"model": f"parabola × {cfg.parabola:g}, {kind}", **_row(objective, (kind, "constructed", 0))})
    generator = run.generator("linear", kind)
    objective = perceptron(kind, scale=1.0, activation="identity", noise=0.5, generator=generator)
    return [*rows, {"model": f"linear, {kind}", **_row(objective, (kind, "random", 0))}]


def _row(objective: NetworkObjective, what: tuple[str, str, int]) -> Row:
    """Return the gap beside the bounds; `squared` and `lemma` in the slides' scale."""
    (kind, state, seed), found = what, gap(objective)
    count = len(objective.data[0])
    total = count * (0.5 if kind == "least squares" else 1.0)  # slides' scale over that of the mean
    largest, ratio = found["smoothness"], 2 * found["loss"] ** (0.5 if kind == "least squares" else 1.0)
    return {
        "kind": kind,
        "state": state,
        "seed": seed,
        "n": objective.size,
        "S": count,
        **found,
        "one_norm_bound": largest * found["one_norm"],
        "loss_bound": largest * ratio,
        "loss_bound_without_L": ratio,
        "squared": (total * found["gap"]) ** 2,
        "lemma": total * largest * found["one_norm"],
    }


def gap(objective: NetworkObjective, *, max_entries: int = 2_000_000) -> dict[str, float]:
    """Return ‖∇²f - F‖ at the current parameters and every bound on it, from dense matrices.

    Keys: gap (spectral norm), loss, smoothness (L here: largest spectral norm of any output's Hessian, example by
    example), one_norm (mean over examples of the 1-norm of the loss's gradient by the outputs). All are in the
    scale of the mean loss. Cost: outputs times examples dense (n, n) matrices, of `max_entries` numbers at a
    time.
    """
    inputs, targets = objective.data
    named = dict(objective.model.named_parameters())
    vector = torch.cat([p.detach().reshape(-1) for p in named.values()])

    def outputs(values: Tensor, batch: Tensor) -> Tensor:
        pieces = values.split([p.numel() for p in named.values()])
        own = {name: piece.view(p.shape) for (name, p), piece in zip(named.items(), pieces, strict=True)}
        return functional_call(objective.model, own, (batch,))

    size = len(vector)
    chunk = max(1, max_entries // (outputs(vector, inputs[:1]).numel() * size**2))
    difference, largest, one_norm, total = vector.new_zeros(size, size), 0.0, 0.0, 0.0
    closed_form = output_loss(objective.loss)
    for batch, labels in zip(inputs.split(chunk), targets.split(chunk), strict=True):
        current = outputs(vector, batch)
        slopes = closed_form.gradient(current, labels)
        hessians = hessian(outputs)(vector, batch)
        # ∇²f - F = Σ_n Σ_j ∂ℓ_n/∂φ_j ∇²φ_j: the loss's own curvature is the same in both.
        difference += torch.einsum("bc,bcij->ij", slopes, hessians)
        largest = max(largest, float(torch.linalg.eigvalsh(hessians).abs().max()))
        one_norm += float(slopes.abs().sum())
        total += float(closed_form.per_example(current, labels).sum())
    divisor = closed_form.count(targets)
    return {
        "gap": float(torch.linalg.matrix_norm(difference / divisor, 2)),
        "loss": total / divisor,
        "smoothness": largest,
        "one_norm": one_norm / divisor,
    }


def summary(bounds: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each (model, state): medians over seeds of the gap and its share of each bound."""
    shares = bounds.assign(
        gap_by_one_norm_bound=bounds.gap / bounds.one_norm_bound,
        gap_by_loss_bound=bounds.gap / bounds.loss_bound,
        gap_by_loss_bound_without_L=bounds.gap / bounds.loss_bound_without_L,
        squared_by_lemma=bounds.squared / bounds.lemma,
    )
    columns = ["n", "S", "loss", "gap", "smoothness", *[name for name in shares if "_by_" in str(name)]]
    return shares.groupby(["model", "state"], sort=False)[columns].median().reset_index()


# ------------------------------------------------------------------------------------ rates
def rate_rows(run: Run, cfg: DictConfig) -> tuple[list[Row], list[Row]]:
    """Return rows of curves (objective, method, seed, step) and of steps against bounds (objective, seed, ε)."""
    if unknown := [name for name in cfg.rate_objectives if name not in RECIPES]:
        raise ValueError(f"unknown rate_objectives {unknown}: choose among {', '.join(map(repr, RECIPES))}.")
    curves, rates = [], []
    for name in run.progress(list(cfg.rate_objectives), "rates"):
        recipe, sizes = RECIPES[name], {"max_steps": cfg.max_steps, "epsilons": list(cfg.epsilons)}
        for seed in range(cfg.num_seeds if recipe.curvature is None else 1):
            stored = _runs(run, recipe, objective=name, recipe=recipe._asdict(), number=seed, **sizes)
            curves += stored["curves"]
            rates += stored["rates"]
    return curves, rates


@unit("rank1/fisher-rates", version=1, about="rates of {objective}, seed {number}")
def _runs(run: Run, chosen: Recipe, /, *, objective: str, number: int, max_steps: int, **key: Any) -> Row:
    function = chosen.make(run.generator("rate task", objective, number))
    start = function.point()
    traces: dict[str, Trace] = {}
    for method in METHODS:
        if method == "lemma as printed" and chosen.kind != "softmax":
            continue
        function.move_to(start)
        traces[method] = descend(function, make_optimizer(function, method), num_steps=max_steps, stop_at=FLOOR)
        run.add_matvecs(traces[method].num_products[-1])
    # f* of perceptrons: zero where it is known, else the best value that any of the methods has met.
    if chosen.curvature is None:
        known = chosen.kind == "least squares" and chosen.activation == "tanh" and chosen.noise == 0
        optimum = 0.0 if known else min(min(trace.values) for trace in traces.values())
        function = dataclasses.replace(function, optimum=optimum)
    curves, rates = [], []
    for method, trace in traces.items():
        names = {"objective": objective, "method": method, "seed": number}
        curves += [names | row for row in trace.rows(NUM_RECORDED, optimum=function.optimum)]
        if method.startswith("lemma"):
            names = {"objective": objective, "kind": chosen.kind, "method": method, "seed": number}
            rates += [names | _rate(names, trace, function, ratio) for ratio in key["epsilons"]]
    return {"curves": curves, "rates": rates}


def make_optimizer(objective: NetworkObjective, method: str) -> Optimizer:
    """Return the Fisher method with the lemma's α_k, with 1 or 0 in place of L, or cubic Newton; one M for all."""
    lipschitz = float(objective.hessian_lipschitz or 0.0)
    if method == "cubic Newton":
        return CubicNewton(objective.parameters, objective.hessian, hessian_lipschitz=lipschitz)
    smoothness = {"lemma": float(objective.smoothness or 0.0), "lemma as printed": 1.0, "σ = 0": 0.0}[method]
    return FisherNewton(objective.parameters, objective.fisher, smoothness=smoothness, hessian_lipschitz=lipschitz)


def _rate(names: Row, trace: Trace, objective: NetworkObjective, ratio: float) -> Row:
    """Return steps to ε = ratio ‖∇f(x_0)‖ beside K(ε): with L, or as the slides print it for softmax, with 1."""
    norms, values = np.array(trace.gradient_norms), np.array(trace.values)
    epsilon, optimum = ratio * norms[0], objective.optimum
    steps = trace.steps_to(epsilon)
    # R: the lemma needs f - f* <= R ‖∇f‖ up to the step that reaches ε.
    radius = float(np.max((values - optimum)[:steps] / norms[:steps]))
    smoothness = float(objective.smoothness or 0.0)
    constant = smoothness if names["method"] == "lemma" else 1.0
    common = {
        "gap": float(values[0] - optimum),
        "gradient_norm": float(norms[0]),
        "hessian_lipschitz": float(objective.hessian_lipschitz or 0.0),
    }
    if names["kind"] == "least squares":  # σ = 2 L sqrt(f) for the mean of r², L sqrt(2 S f) in the slides' scale
        parts = {"sigma": 2 * constant * optimum**0.5, "sigma_root": 2 * constant * radius**0.5}
    else:
        parts = {"sigma": 2 * constant * optimum, "sigma_slope": 2 * constant * radius}
    return {
        "epsilon": epsilon,
        "relative_epsilon": ratio,
        "steps": steps,
        "steps_taken": len(values) - 1,
        "bound": steps_bound(epsilon, **common, **parts),
        "radius": radius,
        "L": smoothness,
        **common,
    }


# ------------------------------------------------------------------------------------ draw
def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figures by file name: gap and bounds; runs with softmax, and steps against K(ε)."""
    table, rates = computed["table"], computed["rates"]
    own = rates[rates.kind == rates.kind.iloc[-1]]
    curves = table[table.objective.isin(own.objective)].replace({"method": {"σ = 0": "lemma, σ = 0"}})
    more = _rates_figure(curves, own)
    return {"figure.png": _bounds_figure(computed["bounds"]), "figure_more.png": more}


def _bounds_figure(bounds: pd.DataFrame) -> Figure:
    """Draw the measured distance over each bound, a dot for each network and seed."""
    curved = bounds[bounds.smoothness > 0]
    softmax = curved[curved.kind == "softmax"]
    statements = [
        ("lemma as printed:\n‖∇²f - F‖² ≤ L Σ‖∇ log p‖_1", curved.squared / curved.lemma, curved),
        ("lemma without the square:\n‖∇²f - F‖ ≤ L mean‖∇ log p‖_1", curved.gap / curved.one_norm_bound, curved),
        ("softmax as printed, without L:\n‖∇²f - F‖ ≤ 2 f", softmax.gap / softmax.loss_bound_without_L, softmax),
    ]
    figure, axes = plots.figure(panel_size=(8.0, 3.2))
    parts = [
        pd.DataFrame({"place": place, "ratio": ratio, "weights": own.state})
        for place, (_, ratio, own) in enumerate(statements)
    ]
    panels.scatter(
        axes[0, 0], pd.concat(parts), x="ratio", y="place", by="weights", identity=False, size=34, alpha=0.7
    )
    panels.rule(axes[0, 0], x=1, label="the bound: true on the left", color="black")
    panels.frame(axes[0, 0], x="measured distance over the bound", log="x")
    axes[0, 0].set(
        yticks=range(len(statements)), yticklabels=[text for text, _, _ in statements], ylim=(2.5, -0.5)
    )
    number = panels.seeds(curved.groupby("model").seed.nunique())
    panels.legend(
        figure, title=f"a mark: a model and a seed, of {number}, with random, trained or constructed weights"
    )
    return figure


def _rates_figure(table: pd.DataFrame, rates: pd.DataFrame) -> Figure:
    """Curves of all methods above, steps of the lemma's rule against K(ε) below; one column for each objective."""
    objectives, styles = table.objective.unique().tolist(), panels.styles_of(table.method.unique())
    figure, axes = plots.figure(2, len(objectives), panel_size=(2.7, 3.0))
    for (above, below), objective in zip(axes.T, objectives, strict=True):
        _curves(above, table[table.objective == objective], styles)
        steps_panel(below, rates[(rates.objective == objective) & (rates.method == "lemma")])
        above.set_title(objective, fontsize=10)
        below.set_ylabel("")
    axes[0, 0].set_ylabel("‖∇f(x_k)‖,\none line for each seed")
    axes[1, 0].set_ylabel("steps of the\nlemma's rule to ε")
    panels.legend(figure)
    return figure


def _curves(ax: Axes, table: pd.DataFrame, styles: dict[Any, Any]) -> None:
    """Draw one line for each seed, and say which methods ended above the floor."""
    shown, missing = table.assign(step=table.step.clip(lower=0.5)), []
    for method, own in shown.groupby("method", sort=False):
        dashed = "--" if method == "lemma as printed" else "-"
        panels.traces(ax, own, x="step", y="gradient_norm", by="method", styles=styles, linestyle=dashed, alpha=1)
        last = own.sort_values("step").groupby("seed").gradient_norm.agg(lambda norms: norms.iloc[-1])
        if (above := int((~(last <= FLOOR)).sum())) > 0:
            missing.append(f"{method}: {above} of {len(last)}")
    ax.set_ylim(FLOOR, 10)
    lines = [f"not at {FLOOR:g} in {table.step.max()} steps:", *missing] if missing else []
    panels.frame(ax, log="xy")
    ax.set_xlabel("\n".join(["step k", *lines]), fontsize=8)  # in the panel it would cover curves
