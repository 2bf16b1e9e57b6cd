"""Frobenius norm, and the largest eigenvalue by sketches and by Lanczos (Klochkov & Liu 2024, Table 3, App. C).

make lissa-tab3 PRESET=smoke|embedded|laptop|paper ARGS="task=mlp_64_64_digits data=mnist"

For each model: ‖G‖_F from pairs of products with two independent batches (App. C) and from products with all the
data, lambda_max from a dense Gaussian sketch and from the per-tensor ("concatenated") one with about as many rows,
by Lanczos with an error bound, and the squared ratio. For some models both sketches are repeated, which gives
their bias and spread. The paper's claim that concatenation reduces the variance of a sketched dot product is
checked on the gradients it is about. It saves random numbers, not products: the per-tensor sketch takes L d
products with G, and a dense one with L d rows has at most its variance.

A symmetric positive semi-definite matrix has ‖G‖_F <= tr(G) and ‖G‖_F² <= lambda_max tr(G). Every row of ours is
checked, and the paper's own: both ResNets break both (‖G‖_F of 2.55e4 and 2.67e4 against traces of 1.45e4 and
2.04e4 from Table 1), so that the two numbers cannot refer to the same parameters and examples. Which ours refer
to: see lissa-tab1, whose rows these are.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Frobenius norm, and the largest eigenvalue by sketches and by Lanczos",
    paper={
        "tasks": ["ResNet-18", "ResNet-50", "OPT-1.3B", "Llama-7B", "Mistral-7B"],
        "table.csv:examples": "5000 images, 50 x 256 tokens a product, sampled",
        "table.csv:dense_rows": 5000,
        "frobenius.num_pairs": "not stated",
    },
    after=("lissa/tab1",),
)
