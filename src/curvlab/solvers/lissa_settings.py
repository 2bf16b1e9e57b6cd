"""LiSSA's step size, batch size and number of steps: from two numbers of the spectrum, measured or given."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from curvlab.curvature import ImportanceOperator, example_importance
from curvlab.linalg import LinearOperator, checked_product, draw_probes
from curvlab.seeding import Seed, as_generator
from curvlab.spectrum import Estimate, hutchinson_trace, top_eigenvalues


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
        constant: C of condition C.1. The paper assumes 2; measured on overfitted networks it is 7 and more,
            and with a C that is too small LiSSA diverges.
        num_time_constants: T in units of 1 / (step_size damping); the slowest error shrinks by exp(-this).

    >>> lissa_hyperparameters(trace=100.0, largest_eigenvalue=4.0, damping=1.0)
    LissaHyperparameters(step_size=0.2, batch_size=50, num_steps=10)
    """
    positive = {
        "trace": trace,
        "largest_eigenvalue": largest_eigenvalue,
        "damping": damping,
        "constant": constant,
        "num_time_constants": num_time_constants,
    }
    for name, value in positive.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be positive and finite, got {value}")
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


@dataclass(frozen=True)
class LissaRecipe:
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
        weights: probabilities by which examples are drawn, (N,); None: uniformly.
        certified: whether C is at most `constant` by proof.
    """

    settings: LissaHyperparameters
    trace: Estimate
    largest_eigenvalue: float
    constant: float
    num_matvecs: int
    num_sampled_matvecs: int
    num_sampled_examples: int
    weights: Tensor | None = field(default=None, repr=False, compare=False)
    certified: bool = False


def measure_recipe(
    operator: LinearOperator,
    damping: float,
    *,
    safety: float = 2.0,
    num_time_constants: float = 4.0,
    generator: Seed = None,
) -> LissaRecipe:
    """Measure λmax, tr and C of G (without damping) and return |B| = safety · C tr / λmax, and the rest.

    C is measured in four leading eigenvectors, four random directions, and where single examples point: the
    supremum over all directions is out of reach, hence the safety factor.

    Cost: some tens of products with G, and 64 batches for C, of 64 examples, or a sixteenth of the data if that is
    less.
    """
    generator = as_generator(generator, operator.device)
    _check_undamped(operator, damping)
    num_leading = min(4, operator.shape[0])
    leading = top_eigenvalues(operator, num_leading, rtol=0.03, generator=generator)
    trace = hutchinson_trace(operator, rtol=0.05, generator=generator)
    probes = draw_probes(operator, 4, generator=generator)
    # A single example's product with a random vector lies in the span of its gradients; the longest of 64
    # is likely an example that carries much curvature, where C is large if the tails are heavy.
    pointed = [operator.sample(1, generator) @ probes[:, :1] for _ in range(64)]
    longest = max(pointed, key=lambda product: float(operator.norm(product)))
    directions = torch.cat([leading.vectors, probes, longest], dim=1)
    directions = directions[:, operator.norm(directions) > 0]
    batch_size = 64 if operator.num_examples is None else min(64, max(4, operator.num_examples // 16))
    constants = measure_constant(
        operator, directions, trace=trace.value, batch_size=batch_size, generator=generator
    )
    largest = float(leading.values[0])
    constant = max(1.0, float(constants.max()))
    settings = lissa_hyperparameters(
        trace=max(trace.value, largest),
        largest_eigenvalue=largest,
        damping=damping,
        constant=safety * constant,
        num_time_constants=num_time_constants,
    )
    sampled = len(pointed) + 64 * directions.shape[1]
    return LissaRecipe(
        settings,
        trace,
        largest,
        constant,
        num_matvecs=leading.num_matvecs + trace.num_matvecs + sampled,
        num_sampled_matvecs=sampled,
        num_sampled_examples=len(pointed) + 64 * batch_size * directions.shape[1],
    )


def _check_undamped(operator: LinearOperator, damping: float) -> None:
    """Raise a ValueError unless a recipe for operator + damping I can be measured."""
    if damping <= 0:
        raise ValueError(f"damping must be positive, got {damping}: LiSSA takes 1 / (step_size damping) steps")
    if not operator.is_psd or operator.damping != 0:
        raise ValueError(
            "the recipe is for a positive semi-definite operator without damping (condition C.1): pass "
            "GaussNewtonOperator(...) itself, and the damping as a number"
        )


def measure_constant(
    operator: LinearOperator,
    directions: Tensor,
    *,
    trace: float,
    num_batches: int = 64,
    batch_size: int = 64,
    generator: Seed = None,
) -> Tensor:
    """Return [E‖G_i v‖² - ‖G v‖²] / (tr(G) vᵀGv), the C of condition C.1, for each direction v, (P, K) -> (K,).

    The numerator is batch_size times the variance of G_t v over independent batches. No full product.
    """
    generator = as_generator(generator, operator.device)
    sums = torch.zeros_like(directions)
    squares = forms = torch.zeros(directions.shape[1], dtype=torch.float64, device=directions.device)
    for _ in range(num_batches):
        products = checked_product(operator.sample(batch_size, generator), directions)
        sums = sums + products
        squares = squares + operator.inner(products, products).double()
        forms = forms + operator.inner(directions, products).double()
    of_mean = operator.inner(sums, sums).double() / num_batches
    variances = batch_size * (squares - of_mean) / (num_batches - 1)
    return (variances / (trace * forms / num_batches)).cpu()


def measure_importance_recipe(
    operator: LinearOperator,
    damping: float,
    *,
    safety: float = 2.0,
    num_time_constants: float = 4.0,
    generator: Seed = None,
) -> LissaRecipe:
    """Measure λmax and all tr(G_i) of G (without damping) and return |B| = safety · C tr / λmax, and the rest.

    Examples are drawn by `example_importance`: C is at most 1.01, no direction is tried, and tr is exact. Then
    |B| >= C tr / λmax is enough, and safety = 2, the paper's own C, halves the sampling noise. Where traces are
    estimated, C is measured (`measure_recipe`).

    Args:
        operator: GaussNewtonOperator of the whole data, also spread over processes, or a DenseOperator of N
            matrices.
        damping: added to G before inversion.
        safety: factor before C.
        num_time_constants: T in units of 1 / (step size damping).
        generator: of probes and estimated traces.

    Cost: some products for λmax, and (1 + C) / 5 products for the traces of C outputs.
    """
    generator = as_generator(generator, operator.device)
    _check_undamped(operator, damping)
    found = example_importance(operator, generator=generator)
    if found.constant is None:
        weighted = ImportanceOperator(operator, found.probabilities)  # type: ignore[arg-type]  # it has traces
        recipe = measure_recipe(
            weighted, damping, safety=safety, num_time_constants=num_time_constants, generator=generator
        )
        num_matvecs = recipe.num_matvecs + found.num_matvecs
        return dataclasses.replace(recipe, weights=found.probabilities, num_matvecs=num_matvecs)
    leading = top_eigenvalues(operator, 1, rtol=0.03, generator=generator)
    trace, largest = float(found.traces.mean()), float(leading.values[0])
    settings = lissa_hyperparameters(
        trace=max(trace, largest),
        largest_eigenvalue=largest,
        damping=damping,
        constant=safety * found.constant,
        num_time_constants=num_time_constants,
    )
    return LissaRecipe(
        settings,
        Estimate(trace, 0.0, found.num_matvecs),
        largest,
        found.constant,
        num_matvecs=leading.num_matvecs + found.num_matvecs,
        num_sampled_matvecs=0,
        num_sampled_examples=0,
        weights=found.probabilities,
        certified=True,
    )
