"""Uniform directions on logistic regression (Semenov 2025, the experiments on mushrooms, 112 x 112).

make rank1-fig2 PRESET=smoke|embedded|laptop|paper ARGS="data=mushrooms l2=1e-4"

Gradient norm and f - f* from x = 0 for: α_k of the lemma, with σ times 1 (the Proposition), 0.1, ..., 0; two other
rules for α_k, `measured` (M and λ as estimated along the path) and `constant`; shifts δ; S or D, with and without
safeguard; means over several directions; beside gradient descent, Newton's method and cubic Newton. The slides
show four such plots without their settings in the text, and no number. M and λ are global constants in closed form
(λ = λmax(AᵀA/N)/4 + l2) unless measured; l2 makes the minimum unique (mushrooms can be separated).

With one direction and given constants a step costs one Hessian product. table.csv holds the curves at about 60
steps each; further.csv a longer run of the lemma's own variant; timing.csv and cost.csv seconds, which no
repetition reproduces.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Uniform directions on logistic regression",
    paper={
        "further.csv:objective": "logistic, mushrooms, n = 112",
        "l2": "not stated",
        "num_steps": "not stated",
        "num_seeds": "not stated",
        "sigma_scales": "not stated",
        "lr_factors": "not stated",
    },
)
