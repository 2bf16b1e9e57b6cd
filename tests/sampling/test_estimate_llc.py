"""What `estimate_llc` promises beside the number: validity, WBIC, resuming, errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from analytic_models import FP64, linear_regression, mean_output, no_inputs
from torch import Tensor, nn

from curvlab.checkpoint import CheckpointWarning
from curvlab.sampling import LLC, default_nbeta, estimate_llc


def estimate(model: nn.Module | None = None, data: Any = None, loss: Any = None, **changes: Any) -> LLC:
    regression, examples = linear_regression(300, 3, seed=0)
    settings = {
        "num_chains": 4,
        "num_draws": 300,
        "num_burnin_steps": 150,
        "step_size": 5e-4,
        "batch_size": 100,
        "localization": 1.0,
        "generator": torch.Generator().manual_seed(0),
    } | changes
    return estimate_llc(model or regression, loss or nn.MSELoss(), data or examples, **settings)


def test_definitions() -> None:
    llc = estimate(steps_per_draw=2)
    model, (inputs, targets) = linear_regression(300, 3, seed=0)
    initial = float((model(inputs).detach() - targets).square().mean())
    assert llc.initial_loss == pytest.approx(initial)
    assert llc.nbeta == pytest.approx(300 / math.log(300))
    assert llc.losses.shape == (4, 300)
    assert llc.burnin_losses.shape == (4, 150)
    torch.testing.assert_close(llc.per_chain, llc.nbeta * (llc.losses.mean(1) - initial))
    assert llc.value == pytest.approx(float(llc.per_chain.mean()))
    assert llc.stderr == pytest.approx(float(llc.per_chain.std()) / 2)
    assert llc.wbic == pytest.approx(300 * float(llc.losses.mean()))
    assert llc.num_gradients == 4 * (150 + 600) * 100
    low, high = llc.interval()
    assert high - low == pytest.approx(2 * 3.18245 * llc.stderr, rel=1e-4)
    assert llc.valid


def test_the_same_generator_gives_the_same_estimate() -> None:
    short = {"num_draws": 30, "num_burnin_steps": 20}
    first = estimate(**short)
    assert torch.equal(first.losses, estimate(**short).losses)
    assert not torch.equal(first.losses, estimate(**short, generator=torch.Generator().manual_seed(1)).losses)
    more = estimate(**short, num_chains=6)
    torch.testing.assert_close(more.per_chain[:4], first.per_chain, rtol=1e-8, atol=1e-10)


def test_the_batch_noise_of_the_start_is_taken_out() -> None:
    llc = estimate(step_size=1e-9, num_draws=50)  # hardly moves: all that is left is rounding and first order
    model, (inputs, targets) = linear_regression(300, 3, seed=0)
    plain = float((model(inputs).detach() - targets).square().std()) / math.sqrt(100)
    assert float(llc.losses.std()) < 1e-2 * plain


def test_one_chain_has_an_interval_too() -> None:
    llc = estimate(num_chains=1, num_draws=1000)
    assert 0 < llc.stderr < 0.5
    assert abs(llc.value - 2) < 5 * llc.stderr + 0.2


def test_chains_that_have_not_mixed_are_invalid() -> None:
    draws = torch.randn(4, 200, generator=torch.Generator().manual_seed(0), dtype=FP64) + 10
    apart = draws + torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=FP64)[:, None]
    assert invalid(apart) == ["the chains have not mixed"]
    assert invalid(draws) == []


def test_chains_that_still_move_are_invalid() -> None:
    llc = estimate(step_size=2e-6, num_burnin_steps=0, localization=1e-6)
    assert not llc.valid
    assert any("still moves" in problem or "have not mixed" in problem for problem in llc.problems)
    noise = torch.randn(8, 400, generator=torch.Generator().manual_seed(0), dtype=FP64)
    trend = torch.linspace(0.6, 1.4, 400, dtype=FP64)
    assert invalid(10 * trend + 20 * noise) == ["the loss still moves"]


def test_a_start_that_is_no_minimum_is_invalid() -> None:
    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, dtype=FP64))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.w.square().sum().expand(len(inputs))

    llc = estimate(Slope(), no_inputs(), mean_output, nbeta=100.0, batch_size=8, num_burnin_steps=300)
    assert llc.value < 0
    assert any("falls below the start" in problem for problem in llc.problems)


def test_a_dip_before_the_draws_is_seen() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = 10 + torch.randn(4, 200, generator=generator, dtype=FP64)
    dip = -5 + torch.randn(4, 100, generator=generator, dtype=FP64)
    assert invalid(draws, dip) == ["the loss falls below the start (by 5"]


def test_a_diverged_chain_is_invalid() -> None:
    llc = estimate(step_size=1.0)
    assert not llc.valid
    assert "smaller step_size" in llc.problems[0]


def test_few_draws_are_invalid() -> None:
    assert "too few draws" in estimate(num_draws=3).problems[0]


def invalid(draws: Tensor, burnin: Tensor | None = None) -> list[str]:
    found = LLC.of_traces(
        draws,
        torch.ones(len(draws), 0, dtype=FP64) if burnin is None else burnin,
        initial_loss=0.0,
        nbeta=1.0,
        step_size=1.0,
        localization=0.0,
        num_examples=10,
        num_gradients=1,
    )
    assert found.valid == (not found.problems)
    return [problem.split(":")[0].split(".")[0].split(" in units")[0] for problem in found.problems]


@pytest.mark.parametrize("chunk_size", [None, 1])
def test_an_interrupted_estimate_resumes_to_the_same_numbers(tmp_path: Path, chunk_size: int | None) -> None:
    short = {"num_draws": 60, "num_burnin_steps": 30}
    whole = estimate(**short)
    count = 0

    def interrupt(num_chains: int) -> None:
        nonlocal count
        count += num_chains
        if count > 180:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        estimate(**short, checkpoint=tmp_path, checkpoint_every=14, on_step=interrupt, chunk_size=2)
    assert sorted(path.name for path in tmp_path.iterdir())[0] == "chain_0000.pt"
    steps = 0

    def counted(num_chains: int) -> None:
        nonlocal steps
        steps += num_chains

    resumed = estimate(**short, checkpoint=tmp_path, on_step=counted, chunk_size=chunk_size)
    assert steps < 4 * 90 - 140
    torch.testing.assert_close(resumed.losses, whole.losses, rtol=1e-9, atol=1e-12)


def test_a_longer_estimate_goes_on_where_the_shorter_ended(tmp_path: Path) -> None:
    short = {"num_burnin_steps": 30}
    steps = []
    estimate(**short, checkpoint=tmp_path, checkpoint_every=50, num_draws=20)
    longer = estimate(**short, checkpoint=tmp_path, num_draws=60, on_step=steps.append)
    assert sum(steps) == 4 * 40
    torch.testing.assert_close(longer.losses, estimate(**short, num_draws=60).losses, rtol=1e-9, atol=1e-12)
    shorter = estimate(**short, checkpoint=tmp_path, num_draws=10)
    torch.testing.assert_close(shorter.losses, longer.losses[:, :10])


def test_checkpoints_of_another_estimate_are_refused(tmp_path: Path) -> None:
    estimate(checkpoint=tmp_path, checkpoint_every=155, num_draws=5)
    with pytest.raises(ValueError, match=r"step_size differ.*its own"):
        estimate(checkpoint=tmp_path, num_draws=5, step_size=1e-4)


def test_checkpoints_of_other_data_or_buffers_are_refused(tmp_path: Path) -> None:
    inputs = torch.randn(50, 3, dtype=FP64, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.zeros_(model.weight)  # all inputs give the same losses at the start
    estimate(model, (inputs, torch.ones(50, 1)), checkpoint=tmp_path, checkpoint_every=155, num_draws=5)
    with pytest.raises(ValueError, match=r"\(data differ\)"):
        estimate(model, (2 * inputs, torch.ones(50, 1)), checkpoint=tmp_path, num_draws=5)


def test_a_damaged_chain_is_named_and_starts_afresh(tmp_path: Path) -> None:
    short = {"num_draws": 5}
    estimate(checkpoint=tmp_path, checkpoint_every=155, **short)
    path = tmp_path / "chain_0000.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.warns(CheckpointWarning, match=r"chain_0000.pt is no readable checkpoint"):
        resumed = estimate(checkpoint=tmp_path, **short)
    torch.testing.assert_close(resumed.losses, estimate(**short).losses, rtol=1e-9, atol=1e-12)


def test_half_precision_is_refused() -> None:
    model = nn.Linear(3, 1).bfloat16()
    with pytest.raises(ValueError, match=r"Pass model.float\(\)"):
        estimate(model, (torch.ones(5, 3), torch.ones(5, 1)))


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"num_chains": 0}, "num_chains"), ({"num_draws": 0}, "num_draws"), ({"checkpoint_every": 0}, "at least 1")]
    + [({"nbeta": value}, "nbeta must be positive and finite") for value in (0.0, math.inf, math.nan)]
    + [({"localization": math.inf}, "must be finite"), ({"batch_size": 16.5}, "a number of examples")],
)
def test_bad_arguments(changes: dict, match: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=match):
        estimate(checkpoint=tmp_path, **changes)


def test_a_seed_in_place_of_a_generator() -> None:
    with pytest.raises(TypeError, match=r"got 0: torch.Generator\(\).manual_seed\(0\)"):
        estimate(generator=0)


def test_nbeta_needs_examples() -> None:
    with pytest.raises(ValueError, match="pass nbeta"):
        default_nbeta(2)
    with pytest.raises(ValueError, match=r"0\.95"):
        estimate(num_draws=10).interval(95)


def test_language_models_with_ignored_targets() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "word_embed_proj_dim": 8, "ffn_dim": 8, "num_hidden_layers": 1}
    config = transformers.OPTConfig(
        vocab_size=20, num_attention_heads=2, max_position_embeddings=16, dropout=0.5, **sizes
    )
    model = transformers.OPTForCausalLM(config).train()
    tokens = torch.randint(3, 20, (12, 6), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = targets[::2, 3:] = -100
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    llc = estimate(
        model,
        (inputs, targets),
        nn.CrossEntropyLoss(),
        num_draws=5,
        num_burnin_steps=0,
        step_size=1e-6,
        batch_size=4,
    )
    logits = model.eval()(**inputs).logits.detach()
    assert llc.initial_loss == pytest.approx(
        float(nn.CrossEntropyLoss()(logits.transpose(1, 2), targets)), rel=1e-5
    )
    assert bool(torch.isfinite(llc.losses).all())


def test_a_convolutional_model_gives_the_same_in_one_vmap() -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 36, 4))
    data = (torch.randn(30, 1, 8, 8, generator=generator), torch.randint(4, (30,), generator=generator))
    chains = [
        estimate(
            model, data, nn.CrossEntropyLoss(), num_draws=10, num_burnin_steps=0, batch_size=8, chunk_size=size
        )
        for size in (None, 4)
    ]
    torch.testing.assert_close(chains[0].losses, chains[1].losses, rtol=1e-4, atol=1e-5)
