"""Influence at ten and a hundred million parameters on a CPU: what it costs, and where it stops being possible.

make bench-scale PRESET=smoke|embedded|laptop|paper ARGS="num_queries=2 num_examples=64"

Every score for a few queries on one thread, by what a user would choose: the gradients' inner product; EK-FAC
alone; influence by the default solver, by block conjugate gradients, and by these with EK-FAC as
preconditioner, all with the damping of the run; the training filter; all rows of the examples where layers and
memory allow. Seconds are processor time from the trained model to the scores. Peak memory is what rises beside
the model and the data. `residual` is ‖b - A x‖ / ‖b‖ of the worst query with A = G + damping I (of the filter
the flow's own), computed after the clock has stopped where a method does not know it. `agreement` is the mean
correlation with the scores of the smallest residual among the solves that ended; none where none did.

A forecast stands beside block conjugate gradients and the filter, made before them: steps that tr(G) / damping
predicts (`predicted_steps`), times queries, times the measured seconds of a product, and the inner products
with all gradients on top. `hours` is the same arithmetic from the products that the solve took, for 50,000
examples and 100 queries: no such run was made, and what sets a solver up, or slows it beside a bare product, is
not in it. A solve ends after `max_steps` with the residual it has then. What is not run says why: vectors that
do not fit into `memory_limit`, a model whose layers do not allow it. "random projection" is a forecast alone,
from a block of parameters: gradients of all examples, multiplied by random numbers that are drawn once, as TRAK
does.

Networks without `training` have random weights: their costs are those of a trained one, their numbers of steps
need not be, and `length` stands for the ηT of a run. Scores, agreement and residuals say nothing about
retraining here. Claims count products; seconds are shown.

Note of 2026-11-27: block conjugate gradients take longer than their forecast, the more the busier the machine:
vectors of this length share the memory's bandwidth with others. Steps, products and residuals do not depend on
it. `agreement` is with a solve that ended: before, the scores of whatever residual was smallest stood for the
exact ones, that of the OPT, stopped above one, among them.
"""

from __future__ import annotations

import dataclasses
import textwrap
from functools import cached_property, partial
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torch import Tensor, nn

from curvlab.curvature import GaussNewtonOperator, sampled_traces
from curvlab.influence import directional_derivatives, per_example_gradients
from curvlab.lab import Computed, Run, Target, panels, plots, unit
from curvlab.lab.names import reader_names
from curvlab.linalg import LinearOperator, identity
from curvlab.solvers import BlockConjugateGradient, Ekfac, Rows, TrainingFilter, default_solver
from curvlab.solvers.preconditioners import predicted_steps
from curvlab.training import RunLength
from experiments.benchmarks.attribution.libraries.own_matrix import run_length
from experiments.shared.gauges import load_average, measure_peak, work_clock
from experiments.shared.stats import correlation
from experiments.shared.task import Task, TrainedTask

DOT, PROJECTION, EKFAC = "gradient dot product", "random projection, 512", "EK-FAC alone"
DEFAULT, CG, PRECONDITIONED = "influence, default solver", "influence, block CG", "influence, block CG with EK-FAC"
ROWS, FILTER = "influence, all rows", "training filter"
METHODS = (DOT, PROJECTION, EKFAC, DEFAULT, CG, PRECONDITIONED, ROWS, FILTER)
SOLVED = (DEFAULT, CG, PRECONDITIONED, ROWS, FILTER)
VECTORS = {DOT: 2, EKFAC: 4, DEFAULT: 10, CG: 10, PRECONDITIONED: 12, ROWS: 10, FILTER: 20}  # for each query
Found = dict[str, Any]
MANY_EXAMPLES, MANY_QUERIES = 50_000, 100
PROJECTIONS, BLOCK, SOME = 512, 2**14, 4

TARGET = Target(
    __name__,
    title="Influence at ten and a hundred million parameters on a CPU",
    paper={"num_queries": "", "num_examples": "", "rtol": "", "max_steps": ""},  # no paper measures this
    timings=("scale", "summary", "*"),
)


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `scale`, a row for each network and method, and `summary`, a row for each network."""
    rows: list[dict[str, Any]] = []
    for task in Task.each(run, cfg):
        rows += _Scale(task.trained()).rows()
    run.note(load_average=load_average())
    table = pd.DataFrame(rows)
    return {"scale": table, "summary": summary(table)}


class _Scale:
    """One network."""

    def __init__(self, task: TrainedTask) -> None:
        self.run, self.task, self.settings, length = task.run, task, task.settings, task.settings.length
        names = ("num_queries", "num_examples", "rtol", "max_steps", "max_size", "length", "memory_limit")
        self.key = task.key | {name: self.settings[name] for name in names}
        self.train = task.pair("train", torch.arange(int(self.settings.num_examples)))
        self.test = task.pair("test", torch.arange(int(self.settings.num_queries)))
        self.length = run_length(task) if length is None else RunLength.constant(float(length), 1)
        self.clock = work_clock(self.run.device)

    @property
    def _examples(self) -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
        return self.task.model, self.task.loss, self.train

    @cached_property
    def matrix(self) -> GaussNewtonOperator:
        """G, without damping."""
        return GaussNewtonOperator(*self._examples, batch_size=self.settings.examples_at_once)

    @cached_property
    def damped(self) -> LinearOperator:
        """G + damping I."""
        return self.matrix + self.length.damping * identity

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each method."""
        price = self._price()
        found = {name: self._measured(price, method=name) for name in METHODS}
        ended = [found[name] for name in SOLVED[:-1] if found[name]["status"] == "done"]
        exact = min(ended, key=lambda own: float(own["residual"]), default=None)
        return [self._row(name, own, price, found[DOT], exact) for name, own in found.items()]

    # ------------------------------------------------------------------------------- measured
    @unit("scale/product", version=2, about="a product of {seed_name}")
    def _price(self, /, **_: Any) -> dict[str, Any]:
        """Return seconds of a product and of the gradient of an example, and tr(G) / damping with its steps."""
        vector = self.matrix.randn(1, torch.Generator().manual_seed(0))[:, 0]
        some = (self.train[0][:SOME], self.train[1][:SOME])
        seconds: dict[str, float] = {}
        works = {"product": partial(self.matrix.matvec, vector), "gradient": partial(self._gradients, some)}
        for name, work in (works | {"projection": partial(_projection, SOME)}).items():
            work()  # what is loaded for a first call is no product's
            start = self.clock()
            work()
            seconds[name] = self.clock() - start
        trace = float(sampled_traces(self.matrix, generator=torch.Generator().manual_seed(0)).mean())
        steps = predicted_steps(trace / self.length.damping, len(self.test[1]), float(self.settings.rtol))
        peak = measure_peak(partial(self.matrix.matvec, vector), self.run.device)
        return seconds | {"trace": trace, "steps": steps, "peak_mib": peak}

    @unit("scale/method", version=1, about="{method}, {seed_name}")
    def _measured(self, price: dict[str, Any], /, *, method: str, **_: Any) -> dict[str, Any]:
        """Return scores with what they cost, or why there are none."""
        if method == PROJECTION:
            return {"status": "forecast alone"}
        needed = 4 * VECTORS[method] * len(self.test[1]) * self.task.num_parameters / 2**30
        if needed > float(self.settings.memory_limit):
            return {"status": f"not run: vectors of {needed:.0f} GiB, limit {self.settings.memory_limit:g}"}
        found: dict[str, Any] = {}
        try:
            peak = measure_peak(lambda: found.update(self._scored(method)), self.run.device)
        except (ValueError, TypeError, NotImplementedError, MemoryError) as error:
            return {"status": f"not run: {str(error).splitlines()[0][:120]}"}
        solved = found.pop("solved", None)
        if "residual" not in found and method != DOT:
            left = found.pop("sides") - self.damped @ solved
            found["residual"] = float((left.norm(dim=0) / self._sides_norm).max())
        found.pop("sides", None)
        return found | {"peak_mib": peak}

    def _scored(self, name: str) -> dict[str, Any]:
        start = self.clock()
        sides = self._gradients(self.test).T
        self._sides_norm = sides.norm(dim=0)
        own: dict[str, Any] = {"status": "done", "num_matvecs": 0, "method": ""}
        if name == DOT:
            solved = sides
        elif name == EKFAC:
            inverse, own["num_matvecs"] = self._ekfac.build(self.damped, generator=0)
            solved, own["method"] = inverse @ sides, str(inverse)
        else:
            found = self._solver(name).solve(self.matrix if name == FILTER else self.damped, sides, generator=0)
            solved, steps = found.x, 0 if found.history is None else len(found.history)
            own |= {"num_matvecs": found.num_matvecs, "residual": float(found.residual.max()), "steps": steps}
            own |= {"method": found.method or type(self._solver(name)).__name__}
            if not found.converged:
                own["status"] = f"stopped after {steps} steps"
        at_once: dict[str, Any] = {"batch_size": self.settings.examples_at_once, "progress": False}
        scores = -directional_derivatives(*self._examples, solved, **at_once).T
        own |= {"seconds": self.clock() - start, "scores": scores}
        return own | ({"solved": solved, "sides": sides} if name == EKFAC else {})

    def _gradients(self, data: tuple[Tensor, Tensor]) -> Tensor:
        return per_example_gradients(self.task.model, self.task.loss, data, progress=False)

    @property
    def _ekfac(self) -> Ekfac:
        return Ekfac(max_size=int(self.settings.max_size))

    def _solver(self, name: str) -> Any:
        rtol, limit = float(self.settings.rtol), int(self.settings.max_steps)
        if name == FILTER:
            return TrainingFilter(self.length.time, rtol=rtol, max_steps=limit)
        if name == DEFAULT:
            solver = default_solver(self.damped.shape[0], len(self.test[1]), rtol=rtol, operator=self.damped)
            return dataclasses.replace(solver, max_steps=limit)
        memory = int(float(self.settings.memory_limit) * 2**29)  # half: their set-up takes as much again
        preconditioner = {CG: None, PRECONDITIONED: self._ekfac, ROWS: Rows(memory_budget=memory)}[name]
        return BlockConjugateGradient(rtol=rtol, max_steps=limit, preconditioner=preconditioner)

    # ------------------------------------------------------------------------------- the row
    def _row(self, name: str, own: Found, price: Found, dot: Found, exact: Found | None) -> Found:
        examples, queries = len(self.train[1]), len(self.test[1])
        scoring, product = dot.get("seconds", float("nan")), price["product"]
        row: dict[str, Any] = {"task": self.task.label, "parameters": self.task.num_parameters, "method": name}
        row |= {"examples": examples, "queries": queries, "damping": self.length.damping, "status": own["status"]}
        row |= {"weights": "random" if self.settings.training is None else "trained"}
        row |= {"solver": own.get("method", ""), "seconds": own.get("seconds"), "products": own.get("num_matvecs")}
        row |= {"steps": own.get("steps"), "product_seconds": product}
        projected = price["gradient"] + self.task.num_parameters / BLOCK * price["projection"]
        solved = scoring + (price["steps"] + 1) * queries * product
        forecasts = {PROJECTION: examples / SOME * projected, CG: solved, FILTER: solved}
        row |= {"forecast_seconds": forecasts.get(name), "residual": own.get("residual")}
        row |= {"peak_gib": own.get("peak_mib", float("nan")) / 2**10, "agreement": float("nan")}
        if exact is not None and "scores" in own:
            row["agreement"] = float(correlation(own["scores"].T, exact["scores"].T).mean())
        if "seconds" in own:
            # A set-up alone does not grow with the queries; steps and inner products do.
            products = own["num_matvecs"] * (1 if name == EKFAC else MANY_QUERIES / queries)
            seconds = products * product + scoring * MANY_QUERIES / queries
            row["hours"] = seconds * MANY_EXAMPLES / examples / 3600
        return row


def _projection(examples: int) -> Tensor:
    """Draw the random numbers of a block of parameters and multiply so many gradients by them."""
    numbers = torch.randn(BLOCK, PROJECTIONS, generator=torch.Generator().manual_seed(0))
    return torch.ones(examples, BLOCK) @ numbers


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each network: what the claims are about; nan where a solve did not end."""
    rows = []
    for task, own in table.groupby("task", sort=False):
        by = own.set_index("method")
        ended = by[by.status == "done"]
        off = float("nan")
        if CG in ended.index:
            # `_row`: products times their seconds, and the inner products with all gradients on top.
            forecast = (ended.forecast_seconds[CG] - by.seconds[DOT]) / ended.product_seconds[CG]
            ratio = float(ended.products[CG] / forecast)
            off = max(ratio, 1 / ratio)
        exact, products = (ended[name].reindex(SOLVED[:-1]).astype(float) for name in ("seconds", "products"))
        row = {"task": task, "parameters": int(own.parameters.iloc[0]), "forecast_off": off}
        row |= {"ekfac_to_cg": float(products[PRECONDITIONED] / products[CG])}
        row |= {"default_to_best": float(exact[DEFAULT] / exact.min())}
        rows.append(row | {"ekfac_agreement": float(by.agreement.get(EKFAC, float("nan")))})
    return pd.DataFrame(rows)


def draw(computed: Computed) -> dict[str, Figure]:
    """Return seconds of every method, measured and forecast, a panel for each network."""
    table = computed["scale"]
    tasks = table.task.unique().tolist()
    figure, axes = plots.figure(1, len(tasks), panel_size=(7.4 / len(tasks), 4.4), sharey=True)
    for ax, task in zip(axes[0], tasks, strict=True):
        own = table[table.task == task].astype({"seconds": float, "forecast_seconds": float})
        panels.bars(ax, own, name="method", value={"seconds": "measured", "forecast_seconds": "forecast"})
        for place, status in enumerate(own.status):
            if status.startswith(("not run", "stopped")):  # at the axis, over the bar
                word = status.split(":")[0].split(" after")[0]
                look = {"fontsize": 7, "va": "center", "color": "white" if word == "stopped" else "black"}
                ax.text(0.02, place - 0.2, word, transform=ax.get_yaxis_transform(), **look)
        for place, (seconds, products) in enumerate(zip(own.seconds, own.products, strict=True)):
            if products > 0 and seconds > 0:
                ax.text(seconds, place - 0.2, f" {products:.0f}", fontsize=8, va="center")
        first = own.iloc[0]
        title = f"{textwrap.fill(reader_names([task], whole=True)[task], 20)}\n"
        title += f"{first.parameters / 1e6:.0f} million parameters\n{first.examples} examples"
        title += "\nrandom weights" if first.weights == "random" else ""
        queries = f"{first.queries} quer{'y' if first.queries == 1 else 'ies'}"
        ax.set_xscale("log")
        ax.set_xlim(right=5 * ax.get_xlim()[1])  # room for the numbers
        panels.frame(ax, x=f"seconds, {queries}", title=title, log="x", size=9)
    note = "numbers: products with the data; stopped: after the steps allowed, before its end\n"
    panels.legend(figure, title=note + "forecast: made before, where there is one")
    return {"figure.png": figure}
