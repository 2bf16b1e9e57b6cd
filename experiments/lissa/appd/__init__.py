"""Influence in a bag-of-words model is TF-IDF (Klochkov & Liu 2024, App. D).

make lissa-appd PRESET=smoke|embedded|laptop|paper ARGS="length=50"

Real text as documents of equal length, in two vocabularies: the most frequent words, and words so rare that p |d|
is at most `max_expected`, as the appendix assumes; beside them documents of the same size drawn from the model.
Damping is given relative to the smallest p. For each query: rank correlation and top-k overlap of influence with
TF-IDF.

What is printed and does not hold: in the damped inverse's second form the rank-one term has the wrong sign (the
form before it is right); the limit of the influence lacks -1 and |d|² (the appendix sums gradients over words and
takes the Hessian of one word; with the Hessian of a document |d| is left). "DF(d)" means DF(t), and p^(-1/2)
weights, IDF = sqrt(1 / DF), are its own variant: the usual log(1 / DF) is shown too. Similarity here is g_qᵀ(G +
λ)⁻¹g_d, as printed; influence on the loss is minus that.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Influence in a bag-of-words model",
    paper={
        "limit.csv:corpus": "none: a derivation",
        "limit.csv:num_documents": "any",
        "limit.csv:num_words": "any",
        "length": "any, equal",
        "dampings": "limit 0",
    },
)
