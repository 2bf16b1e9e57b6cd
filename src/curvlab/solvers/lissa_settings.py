"""LiSSA's step size, batch size and number of steps: from two numbers of the spectrum, measured or given."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from curvlab.arguments import positive, whole
from curvlab.curvature import ImportanceOperator, example_importance
from curvlab.linalg import LinearOperator, checked_product, draw_probes, generator_for
from curvlab.progress import can_be_silent, progress_bar
from curvlab.seeding import Seed
from curvlab.shown import Shown, Summary, counted
from curvlab.solvers.solver import IndefiniteOperatorError
from curvlab.spectrum import Eigenvalues, Estimate, hutchinson_trace, top_eigenvalues


@dataclass(frozen=True)
class LissaHyperparameters:
    """Settings of `Lissa`; pass them on as Lissa(**dataclasses.asdict(settings))."""

    step_size: float
    batch_size: int
    num_steps: int


def lissa_hyperparameters(
    *,
    trace: float,
    largest_eigenvalue: float,
    damping: float,
    constant: float = 2.0,
    num_time_constants: float = 2.0,
) -> LissaHyperparameters:
    """Return the recommendation of Klochkov & Liu (2024), Corollary 1 and the footnote of Table 1.

    step_size = 1 / (λmax + damping), |B| = C tr / λmax, T = 2 / (step_size damping), both rounded up.

    Table 1 prints step_size and T to one or two digits, so its T is up to 1.6 times this one; its |B| = 5 for
    ResNet-50 is not what the formula gives for its trace and λmax (87).

    Args:
        trace: tr(G) without damping (not tr(G)/P, which Table 1 lists).
        largest_eigenvalue: λmax of G without damping.
        damping: added to G before inversion.
        constant: C of condition C.1. The paper assumes 2; overfitted networks exceed it (`make lissa-tab1`),
            and with a C that is too small LiSSA diverges.
        num_time_constants: T in units of 1 / (step_size damping); the slowest error shrinks by exp(-this).

    >>> lissa_hyperparameters(trace=100.0, largest_eigenvalue=4.0, damping=1.0)
    LissaHyperparameters(step_size=0.2, batch_size=50, num_steps=10)
    """
    given = {
        "trace": trace,
        "largest_eigenvalue": largest_eigenvalue,
        "damping": damping,
        "constant": constant,
        "num_time_constants": num_time_constants,
    }
    for name, value in given.items():
        positive(name, value)
    if trace < 0.99 * largest_eigenvalue:  # both are estimates
        raise ValueError(
            f"trace {trace:g} is below largest_eigenvalue {largest_eigenvalue:g}, impossible for a positive "
            "semi-definite matrix: pass tr(G), not tr(G)/P, and both for the same parameters."
        )
    return LissaHyperparameters(
        step_size=1 / (largest_eigenvalue + damping),
        batch_size=math.ceil(constant * trace / largest_eigenvalue),
        num_steps=math.ceil(num_time_constants * (largest_eigenvalue + damping) / damping),
    )


# Of estimated errors. Three spectra, 20 seeds each: without it the true error was above the estimate in 18 of 240
# columns, and 1 of 55 converged solutions broke its promise; with it 5, and none of 51, for twice the steps.
SAFETY = 1.5
MOST_STEPS = 100_000  # beyond, an error counts as out of reach


@dataclass(frozen=True, repr=False)
class LissaRecipe(Shown):
    """Measured spectrum and the settings that follow from it.

    Attributes:
        settings: step size, batch size, number of steps.
        trace: tr(G).
        largest_eigenvalue: λmax(G).
        constant: largest C of condition C.1 over the directions tried: a lower bound of the true one; or, if
            `certified`, an upper bound.
        num_matvecs: products that measuring took; sampled ones are counted as they are.
        num_sampled_matvecs: how many of them were sampled.
        num_sampled_examples: examples that those touched, summed over vectors: divided by N, what they cost.
        probabilities: by which examples are drawn, (N,); None: uniformly.
        certified: whether C is at most `constant` by proof.
        damping: that the settings are for.
        problems: why LiSSA with these settings is not to be used, see `out_of_reach`; empty if nothing was found.
    """

    settings: LissaHyperparameters
    trace: Estimate
    largest_eigenvalue: float
    constant: float
    num_matvecs: int
    num_sampled_matvecs: int
    num_sampled_examples: int
    probabilities: Tensor | None = field(default=None, repr=False, compare=False)
    certified: bool = False
    damping: float = math.nan
    problems: tuple[str, ...] = ()

    def steps_for(self, error_rtol: float) -> int:
        """Return how many steps leave at most this relative error, for any right-hand side of which C holds.

        The mean of n iterates has E‖x - x*‖² of about tr(A⁻¹ Σ A⁻¹) / n <= Δ / (n λ²), Δ = E‖(G_t - G) x‖² <= C tr
        xᵀGx / |B| by condition C.1. Where xᵀGx is at most λ‖x‖², as of solutions that the damped inverse has
        flattened, the relative error is at most sqrt(C tr / (|B| λ n)). n is a third of the steps.
        As in the estimates, `SAFETY` is in it.
        """
        positive("error_rtol", error_rtol, "it is ‖x - A⁻¹b‖ / ‖x‖")
        spread = self.constant * self.trace.value / (self.settings.batch_size * self.damping)
        return max(self.settings.num_steps, math.ceil(3 * spread * (SAFETY / error_rtol) ** 2))

    def out_of_reach(self, error_rtol: float, num_examples: int | None) -> tuple[str, ...]:
        """Return what speaks against running LiSSA to this relative error, in words."""
        steps, found = self.steps_for(error_rtol), []
        if steps > MOST_STEPS:
            found.append(
                f"an error of {error_rtol:g} may take {steps:,} steps: raise error_rtol or the damping, or use "
                "ConjugateGradient, whose steps grow with its logarithm"
            )
        if num_examples is None:
            return tuple(found)
        own = self.settings.num_steps * self.settings.batch_size / num_examples
        if self.settings.batch_size >= num_examples:
            found.append(
                f"a batch of {self.settings.batch_size:,} examples costs as much as all {num_examples:,}: use "
                "ConjugateGradient"
            )
        elif own > (others := self.steps_of_conjugate_gradients(error_rtol)):
            found.append(
                f"its batches hold as many examples as {own:,.0f} products at least, where ConjugateGradient "
                f"takes about {others:,}: use that"
            )
        return tuple(found)

    def steps_of_conjugate_gradients(self, error_rtol: float) -> int:
        """Return after how many products CG is as near at most: √κ/2 ln(2 √κ / error), κ = 1 + λmax / λ."""
        root = math.sqrt((self.largest_eigenvalue + self.damping) / self.damping)
        return math.ceil(root / 2 * math.log(2 * root / error_rtol))

    def summary(self) -> Summary:
        """Return the settings, what they were computed from, and the cost of measuring it."""
        own, kind = self.settings, "at most" if self.certified else "measured, a lower bound:"
        return Summary(
            "LiSSA:",
            f"{counted(own.num_steps, 'step')} of {own.step_size:.3g}, batches of {own.batch_size:,}",
            f"λmax {self.largest_eigenvalue:.3g}, tr {self.trace.value:.3g}, C {kind} {self.constant:.3g}",
            (counted(self.num_matvecs, "product"), f"{self.num_sampled_matvecs:,} of them of batches"),
            self.problems,
        )


@can_be_silent
def measure_recipe(
    operator: LinearOperator,
    damping: float,
    *,
    sampling: Literal["importance", "uniform"] = "importance",
    safety: float = 2.0,
    num_time_constants: float = 4.0,
    budget: float | None = None,
    progress: bool = True,
    generator: Seed = None,
) -> LissaRecipe:
    """Measure λmax, tr and C of G (without damping) and return |B| = safety · C tr / λmax, and the rest.

    "importance": examples are drawn by `example_importance`: C is at most 1.01, no direction is tried, and tr is
    exact. Then |B| >= C tr / λmax is enough, and safety = 2, the paper's own C, halves the sampling noise. Where
    traces are estimated, C is measured.

    "uniform": C is measured in leading eigenvectors, random directions, and where single examples point: the
    supremum over all directions is out of reach, hence the safety factor. tr cancels in C tr, so it need not be
    known well.

    Args:
        operator: G. By importance: a GaussNewtonOperator of the whole data, also spread over processes, or a
            DenseOperator of N matrices.
        damping: added to G before inversion.
        sampling: how batches are drawn.
        safety: factor before C.
        num_time_constants: T in units of 1 / (step size damping).
        budget: products that measuring C may cost, counted in examples: 16 batches in the leading eigenvector and
            where one example points. With ten, each example is drawn five times a direction, so that one with
            much curvature is hardly missed. λmax then takes 20 products at most, and tr eight. None: four
            eigenvectors to 3 %, four random directions, 64 batches of 64 examples, or of a sixteenth of the data
            if that is less, and tr to 5 %: some hundred products in all.
        progress: show bars.
        generator: of probes, batches and estimated traces.

    Raises:
        TypeError: by importance, of an operator that does not know the traces of its examples.

    Cost: by importance some products for λmax, and (1 + outputs) / 5 products for the traces; where C is measured,
    see `budget`.
    """
    generator = generator_for(operator, generator)
    if sampling not in ("importance", "uniform"):
        raise ValueError(f"sampling must be 'importance' or 'uniform', got {sampling!r}")
    safety, budget = _checked(operator, damping, safety, budget)
    found = example_importance(operator, generator=generator) if sampling == "importance" else None
    certified = found is not None and found.constant is not None
    num_leading = 1 if certified or budget is not None else 4
    leading = _leading(operator, num_leading, budget, progress=progress, generator=generator)
    num_matvecs = leading.num_matvecs + (0 if found is None else found.num_matvecs)
    num_sampled = num_examples = 0
    if found is not None and found.constant is not None:
        trace, constant = Estimate(float(found.traces.mean()), 0.0, found.num_matvecs), found.constant
    else:
        if found is not None:
            operator = ImportanceOperator(operator, found.probabilities)  # type: ignore[arg-type]  # it has traces
        trace, constant, num_sampled, num_examples = _tried(operator, leading, budget, progress, generator)
        num_matvecs += trace.num_matvecs + num_sampled
    largest = float(leading.values[0])
    settings = lissa_hyperparameters(
        trace=max(trace.value, largest),
        largest_eigenvalue=largest,
        damping=damping,
        constant=safety * constant,
        num_time_constants=num_time_constants,
    )
    return LissaRecipe(
        settings,
        trace,
        largest,
        constant,
        num_matvecs=num_matvecs,
        num_sampled_matvecs=num_sampled,
        num_sampled_examples=num_examples,
        probabilities=None if found is None else found.probabilities,
        certified=certified,
        damping=damping,
    )


def _tried(
    operator: LinearOperator,
    leading: Eigenvalues,
    budget: float | None,
    progress: bool,
    generator: torch.Generator | None,
) -> tuple[Estimate, float, int, int]:
    """Return tr, the largest C of the directions that are tried, and how many products and examples that took."""
    num_probes, num_batches, num_pointed = (4, 64, 64) if budget is None else (1, 16, 16)
    trace = hutchinson_trace(
        operator,
        num_matvecs=None if budget is None else 8,
        rtol=0.05 if budget is None else None,
        progress=progress,
        generator=generator,
    )
    probes = draw_probes(operator, num_probes, generator=generator)
    # A single example's product with a random vector lies in the span of its gradients; the longest of them
    # is likely an example that carries much curvature, where C is large if the tails are heavy.
    pointed = [operator.sample(1, generator) @ probes[:, :1] for _ in range(num_pointed)]
    longest = max(pointed, key=lambda product: float(operator.norm(product)))
    directions = torch.cat([leading.vectors, *([probes] if budget is None else []), longest], dim=1)
    directions = directions[:, operator.norm(directions) > 0]
    batch_size = 64 if operator.num_examples is None else min(64, max(4, operator.num_examples // 16))
    if budget is not None and operator.num_examples is not None:
        left = budget * operator.num_examples - num_pointed
        batch_size = max(1, min(2048, int(left / (num_batches * max(1, directions.shape[1])))))
    constants = measure_constant(
        operator,
        directions,
        trace=trace.value,
        num_batches=num_batches,
        batch_size=batch_size,
        progress=progress,
        generator=generator,
    )
    sampled = num_batches * directions.shape[1]
    return trace, max(1.0, float(constants.max())), num_pointed + sampled, num_pointed + sampled * batch_size


def _leading(
    operator: LinearOperator, k: int, budget: float | None, *, progress: bool, generator: torch.Generator | None
) -> Eigenvalues:
    rtol, most = (
        (0.03, 300) if budget is None else (0.1, 20)
    )  # a value's error is of the order of the bound's square
    k = min(k, operator.shape[0])
    return top_eigenvalues(operator, k, rtol=rtol, max_matvecs=most, progress=progress, generator=generator)


def _checked(
    operator: LinearOperator, damping: float, safety: float, budget: float | None
) -> tuple[float, float | None]:
    """Return safety and budget, or raise a ValueError where no recipe for operator + damping I can be measured."""
    positive("damping", damping, "LiSSA takes 1 / (step_size damping) steps")
    if operator.damping != 0:
        raise ValueError(
            "the recipe is for a positive semi-definite operator without damping (condition C.1): pass "
            "GaussNewtonOperator(...) itself, and the damping as a number"
        )
    if not operator.is_psd:
        raise IndefiniteOperatorError(operator, "is not positive semi-definite, as condition C.1 of the recipe is")
    return positive("safety", safety), None if budget is None else positive("budget", budget)


@can_be_silent
def measure_constant(
    operator: LinearOperator,
    directions: Tensor,
    *,
    trace: float,
    num_batches: int = 64,
    batch_size: int = 64,
    progress: bool = True,
    generator: Seed = None,
) -> Tensor:
    """Return [E‖G_i v‖² - ‖G v‖²] / (tr(G) vᵀGv), the C of condition C.1, for each direction v, (P, K) -> (K,).

    The numerator is batch_size times the variance of G_t v over independent batches. No full product.
    """
    positive("trace", trace)
    whole("num_batches", num_batches, least=2)  # a variance
    generator = generator_for(operator, generator)
    sums = torch.zeros_like(directions)
    squares = forms = torch.zeros(directions.shape[1], dtype=torch.float64, device=directions.device)
    for _ in progress_bar("C of condition C.1", range(num_batches), progress=progress):
        products = checked_product(operator.sample(batch_size, generator), directions)
        sums = sums + products
        squares = squares + operator.inner(products, products).double()
        forms = forms + operator.inner(directions, products).double()
    of_mean = operator.inner(sums, sums).double() / num_batches
    variances = batch_size * (squares - of_mean) / (num_batches - 1)
    return (variances / (trace * forms / num_batches)).cpu()
