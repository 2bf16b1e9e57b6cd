"""Theorem 1 and Corollary 1 against measured errors of LiSSA (Klochkov & Liu 2024, Sec. 3, App. B.1, B.2).

make lissa-thm1 PRESET=smoke|embedded|laptop|paper ARGS="damping_ratio=0.1"

For problems whose Gauss-Newton matrix can be held (a trained network; the task of App. B.4 with finitely many
examples, where C of condition C.1 is 1), u_0 = 0 and η = 1 / (λmax + λ): E‖u_t - u*‖² over trials of `Lissa`, for
batches of 1 to 1,000, beside the theorem's bound with the best δ of condition (9) and beside (10) as printed; the
limit of the error, and the |B| at which it stops existing, from the exact second moments.

What is printed and does not hold: (10) lacks the factor δ⁻¹, about 1 / (2ηλ), of the theorem's second term: what
stands there is the variance of one update, but updates add up. B.1 concludes η² (E H_t² - H²) ⪯ η(H + λ) - δ from
(9), which gives 2η(H + λ) - η²(H + λ)² - δ only; with u_0 on the far side of u* the theorem's second bound then
fails (`one of 10` here; `Bounds.corrected` holds for every start). B.2 has C tr / |B| >= 1/η - λ for <=, and
λ(η + H) for η(λ + H); B.1 ends with (1 - δ)² for (1 - δ)^t.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Theorem 1 and (10) against measured errors",
    paper={
        "settings.csv:problem": "any",
        "batch_sizes": "any",
        "damping_ratio": "any",
        "damping_ratios": "any",
        "table.csv:num_trials": "expectation",
    },
)
