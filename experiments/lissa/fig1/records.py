"""Fig. 1, records: what `scores` hands to `tables`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from curvlab.solvers import LissaHyperparameters


@dataclass(frozen=True)
class Pairs:
    """LiSSA and the PBRF by SGD with one choice of batches, a run of both for each seed, on the same batches.

    Attributes:
        settings: step size, batch size and steps of both.
        constant: C in |B| = C tr / lambda_max; nan where |B| was given.
        lissa: (seeds, M, K') influence by LiSSA, of the first K' points; one seed where |B| >= N, nothing drawn.
        pbrf: (seeds, M, K') response of the test losses by SGD.
        lissa_lengths: (seeds, T, K') ‖x_t‖ damping / ‖g‖: above 1 it is no solution.
        sgd_lengths: (seeds, T, K') the same of SGD's displacement over epsilon.
        distances: (seeds, T, K') the same of the difference between the two.
    """

    settings: LissaHyperparameters
    constant: float
    lissa: Tensor
    pbrf: Tensor
    lissa_lengths: Tensor
    sgd_lengths: Tensor
    distances: Tensor


@dataclass(frozen=True)
class Scores:
    """Everything that Fig. 1 needs about one task.

    Attributes:
        point_indices: (K,) into the training set.
        test_indices: (M,) into the test set.
        images: (K, ...) the points' inputs.
        spectrum: trace, its standard error, largest eigenvalue and its error bound, nan where nothing asks for
            them.
        damping: added to G.
        assumed: LiSSA and SGD with C = 2.
        measured: with C measured; None where it is not asked for.
        importance: with C = 2 and examples drawn by importance; None where it is not asked for.
        larger: with C = 2 and a larger epsilon; None where it is not asked for.
        cg: (M, K'') influence by conjugate gradients, of the first K'' points; K'' may be 0.
        exact: (M, K'') response by Newton's method.
        residuals: largest relative residual of CG and gradient norm of Newton; nan without them.
    """

    point_indices: Tensor
    test_indices: Tensor
    images: Tensor
    spectrum: dict[str, float]
    damping: float
    assumed: Pairs
    measured: Pairs | None
    importance: Pairs | None
    larger: Pairs | None
    cg: Tensor
    exact: Tensor
    residuals: dict[str, float]
