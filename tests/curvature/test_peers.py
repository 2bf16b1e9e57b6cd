"""Against curvlinops, in single precision."""

from collections.abc import Iterator

import pytest
import torch
from curvature_cases import problem
from torch.testing import assert_close

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator


@pytest.fixture
def _plain_attention() -> Iterator[None]:
    """Keep the peer off attention's fast path, which has no forward-mode derivative."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(enabled)


@pytest.mark.usefixtures("_plain_attention")
@pytest.mark.parametrize("loss", ["ce", "ce_sum", "mse", "mse_sum", "bce"])
@pytest.mark.parametrize("model", ["mlp_gelu", "conv_batch_norm", "attention"])
def test_agrees_with_curvlinops_in_single_precision(
    model: str, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    case = problem(model, loss)
    network = case.model.float()
    targets = case.targets.float() if case.targets.is_floating_point() else case.targets
    arguments = (network, case.loss, list(network.parameters()), [(case.inputs.float(), targets)])
    peers = [
        (GaussNewtonOperator(*case), curvlinops.GGNLinearOperator),
        (HessianOperator(*case), curvlinops.HessianLinearOperator),
    ]
    if loss.startswith("ce"):  # for means over several outputs its empirical Fisher has a scale of its own
        peers.append((FisherOperator(*case, kind="empirical"), curvlinops.EFLinearOperator))
    for op, peer in peers:
        vectors = op.randn(2, torch.Generator().manual_seed(0))
        expected = peer(*arguments, check_deterministic=False) @ vectors
        assert_close(op @ vectors, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
