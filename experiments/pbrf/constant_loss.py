"""The loss of the best constant outputs: what a network must be below to have learned anything."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def constant_loss(loss: nn.Module, targets: Tensor) -> float:
    """Return the least mean loss over `targets` of outputs that do not depend on the input.

    Cross-entropy: the entropy of the frequencies of classes (of tokens; -100 is left out); binary cross-entropy:
    that of each output's mean; squared error: the variance; the latter two are means over the outputs.
    """
    if isinstance(loss, nn.CrossEntropyLoss):
        classes = targets[targets != loss.ignore_index].flatten()
        shares = torch.bincount(classes).double() / len(classes)
        return float(torch.special.entr(shares).sum())
    columns = targets.double().reshape(len(targets), -1)
    if isinstance(loss, nn.BCEWithLogitsLoss):
        shares = columns.mean(0)
        return float((torch.special.entr(shares) + torch.special.entr(1 - shares)).mean())
    if isinstance(loss, nn.MSELoss):
        return float(columns.var(0, correction=0).mean())
    raise TypeError(f"the best constant outputs are not known for {type(loss).__name__}")
