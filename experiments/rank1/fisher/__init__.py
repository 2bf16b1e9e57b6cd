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

from curvlab.lab import Target

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
)
