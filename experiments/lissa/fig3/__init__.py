"""Similarity of 20 sentences by gradients and by influence (Klochkov & Liu 2024, Sec. 5, Fig. 3, App. A).

make lissa-fig3 PRESET=smoke|embedded|laptop|paper ARGS="damping_ratio=0.05 model_seeds=[0,1,2,3]"

Ten facts, each written twice (experiments/papers/lissa/sentences.csv). For several trained models: the cosines of
the gradients of the sentences' losses, the same through (G + damping)⁻¹, and their difference, with the means of
its 10 × 10 squares; then how well each of them picks a sentence's other wording out of ten.

Where we differ from the paper: models trained here; `damping` is the paper's share of lambda_max, 5 / 780;
the systems are solved by block CG to a residual of `solver.rtol`, and LiSSA, with the paper's settings at our
scale (step_size · lambda_max, steps, sequences in a batch), is compared with that on `lissa_check.sentences` of
them. Of the caption's step size 0.003 two readings are run: as printed it is 2.3 / lambda_max, above
2 / lambda_max; as the `lr` of the authors' code, which is step size times damping (for damping > 1), it is 6e-4 =
0.47 / lambda_max.

The caption calls the right heat map "the difference between the former and the latter" (influence, gradient), the
text says that its values are positive because gradient similarity is higher: it is gradient - influence.
The squares' standard errors treat their 100 values as independent, as the paper does; 20 sentences are fewer, so
intervals of claims are over trained models, or over facts (jackknife) where there is one model.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Similarity of sentences by gradient and influence",
    paper={
        "tasks": "OPT 1.3B",
        "summary.csv:num_parameters": 1.3e9,
        "model_seeds": "one published model",
        "damping_ratio": "5 / 780",
        "summary.csv:damping": 5.0,
        "sequence_length": 512,
        "summary.csv:num_sequences": "4 in each of 1,000 steps",
        "solver._target_": "LiSSA",
    },
)
