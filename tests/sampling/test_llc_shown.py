"""How an estimate shows itself: printed, in a notebook, drawn."""

from __future__ import annotations

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.sampling import LLC


@pytest.fixture
def llc() -> LLC:
    excess = torch.randn(4, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 10
    return of(excess)


def of(excess: torch.Tensor) -> LLC:
    sizes = {"num_examples": 300, "num_gradients": 80_000, "initial_loss": 0.5}
    return LLC.of_traces(excess, excess[:, :50], nbeta=2.0, step_size=1e-4, localization=3.0, **sizes)


def test_it_prints_value_error_cost_and_mixing_in_two_lines(llc: LLC) -> None:
    first, second = str(llc).splitlines()
    assert first == f"LLC {llc.value:.4g} ± {llc.stderr:.2g} (standard error, 4 chains x 200 draws)"
    assert f"80,000 example gradients, R-hat {llc.rhat:.3f}" in second
    assert repr(llc) == str(llc)  # no tensors in a notebook's output either


def test_it_says_when_it_is_not_to_be_used(llc: LLC) -> None:
    apart = of(nbeta_free(llc) + torch.tensor([0.0, 1.0, 2.0, 3.0])[:, None])
    assert "not to be used: the chains have not mixed" in str(apart)
    assert "not to be used" in apart._repr_html_()
    assert "not to be used" not in llc._repr_html_()
    assert "not to be used" in apart.plot(axes()).get_title()


def nbeta_free(llc: LLC) -> torch.Tensor:
    return llc.losses - llc.initial_loss


def axes() -> Axes:
    return Figure().add_subplot()


def test_running_means_end_at_the_chains_estimates(llc: LLC) -> None:
    drawn = llc.plot(axes())
    assert drawn.get_title() == ""
    ends = {line.get_label(): line.get_ydata()[-1] for line in drawn.lines if line.get_label().startswith("chain")}
    assert list(ends.values()) == pytest.approx(llc.per_chain.tolist())
    assert drawn.get_xlim()[0] < -50  # the burn-in stands before 0


def test_kept_traces_give_the_same_estimate(llc: LLC) -> None:
    again = LLC.of_traces(**llc.traces())
    assert again.value == pytest.approx(llc.value, rel=1e-6)
    assert again.stderr == pytest.approx(llc.stderr, rel=1e-5)
    assert (again.nbeta, again.localization, again.num_gradients) == (2.0, 3.0, 80_000)
    torch.testing.assert_close(again.losses, llc.losses, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(again.burnin_losses, llc.burnin_losses, rtol=1e-6, atol=0.0)
    kept = sum(part.nbytes for part in llc.traces().values() if isinstance(part, torch.Tensor))
    assert kept == 4 * (200 + 50) * 4
