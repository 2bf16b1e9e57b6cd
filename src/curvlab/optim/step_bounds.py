"""How many steps the lemmas of Semenov (2025) ask for."""

from __future__ import annotations

import math


def steps_bound(
    epsilon: float,
    *,
    gap: float,
    gradient_norm: float,
    hessian_lipschitz: float,
    sigma: float = 0.0,
    sigma_slope: float = 0.0,
    sigma_root: float = 0.0,
) -> float:
    """Return K(ε), steps enough for min ‖∇f(x_k)‖ <= ε, for α_k = sqrt(M ‖∇f‖ / 2) + σ(x_k).

    K = ⌈8 (f(x_0) - f*) (sqrt(M/2) ε^-3/2 + Σ terms of σ) + 2 log(‖∇f(x_0)‖ / ε)⌉, where a part of σ(x) that is

    - constant, at most `sigma`, adds sigma ε^-2 (the lemma on uniform directions, Eq. 3);
    - at most sigma_root ‖∇f(x)‖^½ adds sigma_root ε^-3/2 (least squares: L sqrt(2 S R), beside the constant
      L sqrt(2 S f*));
    - at most sigma_slope ‖∇f(x)‖ adds sigma_slope ε^-1 (softmax: 2 L R, beside the constant 2 L f*).

    R is a number with f - f* <= R ‖∇f‖, which the slides leave undefined. Eq. 3 as printed has log(‖∇f(x_0)‖ / 2):
    under f -> c f (M, σ, ε and gradients times c) the method takes the same steps, and only the form above keeps
    its value. The step that carries the proof: with D positive semi-definite and ‖D - H‖ <= σ, a step of norm r
    has ‖∇f(x_{k+1})‖ <= 2 α_k r and lowers f by at least α_k r²/2 >= ‖∇f(x_{k+1})‖² / (8 α_k).

    S is not positive semi-definite. For convex f the proof still goes through, for every draw and not only on
    average, with 8 / (1 - κ) in place of 8: ‖S - H‖ <= λ (n - 1) < σ, and the smallest eigenvalue of S is at least
    -λn/8 = -κσ with κ = n / (8 sqrt(n (n - 1))) <= 0.18. For f that is not convex the lemma is false: S + α_k I
    may be indefinite, and where it is definite a step may still be too long. Already for n = 1 (D = f'', σ = 0)
    the method can cycle for ever: experiments/rank1/objectives.py, `trapping_curve`.

    Args:
        epsilon: ε > 0.
        gap: f(x_0) - f*.
        gradient_norm: ‖∇f(x_0)‖.
        hessian_lipschitz: M.
        sigma: see above.
        sigma_slope: see above.
        sigma_root: see above.
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon must be positive, got {epsilon}")
    terms = (math.sqrt(hessian_lipschitz / 2) + sigma_root) * epsilon**-1.5 + sigma * epsilon**-2
    terms += sigma_slope / epsilon
    return math.ceil(8 * gap * terms + 2 * math.log(gradient_norm / epsilon))


def printed_steps_bound(
    epsilon: float, *, gap: float, gradient_norm: float, hessian_lipschitz: float, sigma: float
) -> float:
    """Return K(ε) as Eq. 3 prints it, with log(‖∇f(x_0)‖ / 2)."""
    terms = math.sqrt(hessian_lipschitz / 2) * epsilon**-1.5 + sigma * epsilon**-2
    return math.ceil(8 * gap * terms + 2 * math.log(gradient_norm / 2))
