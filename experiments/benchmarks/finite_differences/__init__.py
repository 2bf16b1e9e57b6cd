"""Finite differences against forward mode: the error of G v against the step, in both precisions.

make bench-finite-differences PRESET=smoke|embedded|laptop|paper ARGS="num_vectors=20"

Klochkov & Liu (2024), Sec. 2, compute J v by [h(θ + δv) - h(θ - δv)] / 2δ with δ = 0.01 for vectors of any norm.
The step here is the norm of the perturbation, δ‖v‖. Too large a step meets the curvature of the outputs, or the
kinks of a network with ReLU; too small a one meets rounding, of size machine epsilon over step. The truth is
forward mode in double precision, for both precisions; forward mode in single precision is shown beside them.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Finite differences against forward mode",
    paper={"num_vectors": "", "curvature_train": ""},  # the paper gives δ = 0.01, which is no norm, and no error
)
