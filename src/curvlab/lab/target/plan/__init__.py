"""A dry run: what a target would take, from its config and from a probe of a few seconds; nothing is computed.

Networks are built on the meta device, so that a size costs nothing. A product is counted as five forwards of all
its examples, a gradient as three. Seconds are CPU seconds of one thread on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from curvlab.lab.target.declaration import Target
from curvlab.lab.target.plan.costs import (
    FORWARDS_OF_A_GRADIENT,
    FORWARDS_OF_A_PRODUCT,
    Cost,
    cost_of,
    normals_per_second,
)
from curvlab.lab.target.plan.peaks import GPU, drawn_numbers, fits, in_words, machines, unit_peaks
from curvlab.lab.target.plan.products import DECLARED, Products, Published, published_run
from curvlab.lab.target.plan.sizes import Sizes, UnplannableError, examples_of_a_pass, in_bytes, sizes_of
from curvlab.lab.target.plan.times import in_time
from curvlab.lab.target.tasks import plain_task_settings


@dataclass(frozen=True)
class TaskPlan:
    """One task: sizes, the cost of a product, and how many; or the reason why not.

    Attributes:
        name: of the task.
        sizes: None where they are not known, for `reason`.
        cost: of an example in a product.
        products: None where their number follows from results.
        epochs: of one training; 0 for published weights.
        peaks: bytes of its units of work; empty where none is known.
        drawn: normals that its sketches draw, with the vectors that its machine holds; 0 without one.
        reason: why there are no sizes.
    """

    name: str
    sizes: Sizes | None = None
    cost: Cost | None = None
    products: Products | None = None
    epochs: float = 0.0
    peaks: Mapping[str, float] = field(default_factory=dict)
    drawn: float = 0.0
    reason: str = ""

    @property
    def product_seconds(self) -> float | None:
        """Of one product with all examples."""
        if self.sizes is None or self.cost is None or self.sizes.num_examples is None:
            return None
        return self.cost.seconds * self.sizes.num_examples

    @property
    def training_seconds(self) -> float | None:
        """Of one training."""
        product = self.product_seconds
        return None if product is None else self.epochs * product * FORWARDS_OF_A_GRADIENT / FORWARDS_OF_A_PRODUCT

    @property
    def drawing_seconds(self) -> float:
        """Of the normals of its sketches, drawn here by one thread."""
        return self.drawn / normals_per_second() if self.drawn else 0.0

    @property
    def seconds(self) -> float | None:
        """Of the declared products, the normals of sketches and one training."""
        if self.products is None or self.product_seconds is None or self.cost is None:
            return None
        products = self.products.full * self.product_seconds + self.products.examples * self.cost.seconds
        return products + self.drawing_seconds + (self.training_seconds or 0.0)


@dataclass(frozen=True)
class Plan:
    """A target at a preset.

    Attributes:
        target: whose plan.
        preset: likewise.
        tasks: each for itself; empty for targets whose config has none.
        num_seeds: each of which trains anew.
        published: what the last published run of this preset took.
    """

    target: Target
    preset: str
    tasks: tuple[TaskPlan, ...]
    num_seeds: int
    published: Published | None

    @property
    def seconds(self) -> float | None:
        """Estimated from what is declared; else from the number of products that the published run counted."""
        declared = [task.seconds for task in self.tasks]
        if declared and None not in declared:
            return sum(seconds for seconds in declared if seconds is not None)
        products = [task.product_seconds for task in self.tasks]
        if not products or None in products or self.published is None or self.published.num_matvecs == 0:
            return None
        known = [seconds for seconds in products if seconds is not None]
        trainings = sum(task.training_seconds or 0.0 for task in self.tasks)
        return self.published.num_matvecs * sum(known) / len(known) + self.num_seeds * trainings

    @property
    def is_declared(self) -> bool:
        """Whether the config tells all products of all tasks."""
        return bool(self.tasks) and all(task.products is not None for task in self.tasks)

    @property
    def basis(self) -> str:
        """What `seconds` rests on, or why there are none."""
        if not self.tasks:
            return "its config has no tasks, so that there is nothing to plan from"
        if any(task.product_seconds is None for task in self.tasks):
            return "the sizes of a task are not known before its data are read"
        if self.is_declared:
            return "products as the config declares them, the normals of sketches, one training for each task"
        if self.published is None:
            return "the number of products follows from what is found, and this preset was never published"
        if self.published.num_matvecs == 0:
            return "the published run counted no products: chains, races or retraining are all of it"
        return (
            f"{self.published.num_matvecs:,} products, as the published run counted them, each with all examples "
            f"of an average task, and {self.num_seeds} trainings of each. Products with small batches count too "
            "much here, chains and retraining not at all: the published run's own time is the better guess"
        )


def plan_of(target: Target, cfg: DictConfig) -> Plan:
    """Return the plan of a target as its config says. Cost: a probe of about a second for each task."""
    whole: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]  # a mapping
    declared = DECLARED.get(target.key)
    tasks = []
    for name, settings in plain_task_settings(cfg).items():
        try:
            sizes = sizes_of(settings)
        except UnplannableError as reason:
            tasks.append(TaskPlan(name, reason=str(reason)))
            continue
        products = None if declared is None else declared(settings, sizes)
        training = settings.get("training") or {}
        peaks = unit_peaks(settings, sizes)
        devices = machines(max(peaks.values(), default=0.0)) or 8
        drawn = drawn_numbers(settings, sizes, memory=devices * GPU) if "sketch" in peaks else 0.0
        epochs = float(training.get("num_epochs") or 0)
        tasks.append(TaskPlan(name, sizes, cost_of(sizes), products, epochs, peaks, drawn))
    return Plan(target, str(cfg.preset), tuple(tasks), _num_seeds(whole), published_run(target, str(cfg.preset)))


def _num_seeds(config: Mapping[str, Any]) -> int:
    seeds = config.get("seeds")
    if isinstance(seeds, list):
        return len(seeds)
    return int(seeds or config.get("num_seeds") or 1)


def describe(plan: Plan) -> str:
    """Return the plan as text."""
    lines = [f"{plan.target.make_name} ({plan.preset}): a plan; nothing is computed"]
    for task in plan.tasks:
        lines += _of_task(task)
    if plan.seconds is None:
        lines.append(f"time: not planned: {plan.basis}")
    else:
        what = "time" if plan.is_declared else "products and trainings alone"
        lines.append(f"{what}: about {in_time(plan.seconds)}, one thread; {plan.basis}")
    if plan.published is not None:
        lines.append(f"published run: {in_time(plan.published.seconds)} CPU time ({plan.published.device})")
        lines += [f"  {unit}" for unit in plan.published.units]
    return "\n".join(lines)


def _of_task(task: TaskPlan) -> list[str]:
    if task.sizes is None or task.cost is None:
        return [f"{task.name}: not planned: {task.reason}"]
    sizes, batch = task.sizes, examples_of_a_pass(task.sizes)
    count = "unknown" if sizes.num_examples is None else f"{sizes.num_examples:,}"
    frozen = sizes.total_parameters - sizes.num_parameters
    beside = f" and {frozen:,} frozen" if frozen else ""
    peaks = [in_bytes(sizes.peak_bytes(size)) for size in (batch, 1)]
    seconds = in_time(task.cost.seconds)
    least = in_bytes(sizes.peak_bytes(1, low_memory=True))
    lines = [
        f"{task.name}: {sizes.num_parameters:,} parameters{beside}, {count} examples",
        f"  one example: {sizes.flops:.3g} FLOP a forward, {seconds} a product ({task.cost.source})",
        f"  peak: {peaks[0]} for a product of {batch} examples at once, {peaks[1]} of one, {least} in two passes",
    ]
    if task.peaks:
        lines.append(f"  {in_words(task.peaks)}")
    if task.drawn:
        machine, drawing = fits(max(task.peaks.values())), in_time(task.drawing_seconds)
        lines.append(
            f"  its sketches draw {task.drawn:.3g} normals with the vectors that {machine} holds: {drawing} of "
            f"one thread here, {normals_per_second():.2g} in a second"
        )
    if task.product_seconds is not None:
        product = f"  one product: {in_time(task.product_seconds)}"
        training = f"; one training: {in_time(task.training_seconds or 0)}" if task.epochs else ""
        lines.append(product + training)
    if task.products is not None:
        lines.append(
            f"  products: {task.products.full:,.0f} with all examples, {task.products.examples:,.0f} with one"
        )
    return lines
