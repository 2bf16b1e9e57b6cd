"""Chains in chunks and threads, killed and resumed, on every form of data, and when memory runs out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from analytic_models import FP64, linear_regression
from torch import Tensor, nn

from curvlab.iterate import Checkpoint, CheckpointWarning
from curvlab.problem.memory import MemoryWarning
from curvlab.sampling import SGLD, ChainsState, ChainTraces, RMSProp, UnderdampedLangevin, run_chains
from curvlab.training import EnsembleLosses

SETTINGS = {"step_size": 1e-4, "nbeta": 20.0, "localization": 3.0, "batch_size": 7}
SEEDS = [11, 12, 13, 14, 15]
SAMPLERS = {
    "sgld": lambda losses: SGLD(losses, **SETTINGS),
    "rmsprop": lambda losses: SGLD(losses, **SETTINGS, preconditioner=RMSProp(), num_burnin_steps=10),
    "averaged": lambda losses: UnderdampedLangevin(losses, **SETTINGS, friction=math.inf),
    "underdamped": lambda losses: UnderdampedLangevin(losses, **SETTINGS, friction=30.0),
}


def small_network() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.5), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    inputs = torch.randn(50, 6, generator=generator)
    return model, (inputs, torch.randint(3, (50,), generator=generator))


def losses_of(model: nn.Module, data: Any) -> EnsembleLosses:
    return EnsembleLosses(model, nn.CrossEntropyLoss(), data)


@pytest.mark.parametrize("threads_from", [10, 10**9], ids=["threads", "one thread"])
@pytest.mark.parametrize("chunk_size", [1, 3])
def test_chunks_and_threads_change_nothing(
    chunk_size: int, threads_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("curvlab.sampling.chains.MIN_PARAMETERS_FOR_THREADS", threads_from)
    monkeypatch.setattr("curvlab.sampling.chains._num_threads", lambda: 2)
    sampler = SAMPLERS["rmsprop"](losses_of(*small_network()))
    together = run_chains(sampler, SEEDS, 20, chunk_size=5)
    apart = run_chains(sampler, SEEDS, 20, chunk_size=chunk_size)
    for one, two in zip(apart.parts(), together.parts(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    alone = run_chains(sampler, SEEDS[3:4], 20)
    torch.testing.assert_close(alone.positions[0], together.positions[3], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize(("chunk_size", "later"), [(2, None), (2, 1), (5, 3)])
def test_killed_chains_end_at_the_same_numbers(
    kind: str, chunk_size: int, later: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers are drawn 8 steps ahead here, so that most of the later ones are drawn after the kill."""
    monkeypatch.setattr("curvlab.sampling.sgld._MAX_STEPS_AHEAD", 8)
    model, data = linear_regression(60, 2, seed=0)
    losses = EnsembleLosses(model, nn.MSELoss(), data)
    whole = run_chains(SAMPLERS[kind](losses), SEEDS, 40)
    taken: list[int] = []

    def killed(state: ChainsState) -> None:
        taken.append(state.num_chains)
        if sum(taken) > 5 * 25:
            raise KeyboardInterrupt

    place = Checkpoint(tmp_path, every=13)
    with pytest.raises(KeyboardInterrupt):
        run_chains(SAMPLERS[kind](losses), SEEDS, 40, chunk_size=chunk_size, checkpoint=place, callback=killed)
    assert "chain_11.pt" in {path.name for path in tmp_path.iterdir()}
    steps: list[int] = []
    settings = {"chunk_size": later, "checkpoint": tmp_path, "callback": lambda s: steps.append(s.num_chains)}
    resumed = run_chains(SAMPLERS[kind](losses), SEEDS, 40, **settings)
    assert sum(steps) <= 5 * 40 - 52
    for one, two in zip(resumed.parts(), whole.parts(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)
    assert not list(tmp_path.iterdir())  # what is done needs no file


def interrupted(folder: Path, model: nn.Module, data: Any, *, steps: int = 20, **settings: Any) -> None:
    def killed(state: ChainsState) -> None:
        if state.num_steps == steps:
            raise KeyboardInterrupt

    losses = EnsembleLosses(model, nn.MSELoss(), data)
    sampler = SGLD(losses, **(SETTINGS | settings))
    with pytest.raises(KeyboardInterrupt):
        run_chains(sampler, SEEDS, 30, checkpoint=Checkpoint(folder, every=10), callback=killed)


def resumed(folder: Path, model: nn.Module, data: Any, num_steps: int = 30, **settings: Any) -> ChainTraces:
    sampler = SGLD(EnsembleLosses(model, nn.MSELoss(), data), **(SETTINGS | settings))
    return run_chains(sampler, SEEDS, num_steps, checkpoint=folder)


@pytest.mark.parametrize("num_steps", [5, 50])
def test_a_killed_run_goes_on_to_another_length(num_steps: int, tmp_path: Path) -> None:
    model, data = linear_regression(60, 2, seed=0)
    interrupted(tmp_path, model, data)
    found = resumed(tmp_path, model, data, num_steps)
    assert found.losses.shape == (5, num_steps)
    whole = run_chains(SGLD(EnsembleLosses(model, nn.MSELoss(), data), **SETTINGS), SEEDS, num_steps)
    torch.testing.assert_close(found.losses, whole.losses, rtol=1e-9, atol=1e-12)


def test_files_of_other_chains_are_refused(tmp_path: Path) -> None:
    inputs = torch.randn(50, 3, dtype=FP64, generator=torch.Generator().manual_seed(0))
    model, targets = nn.Linear(3, 1, bias=False).double(), torch.ones(50, 1)
    nn.init.zeros_(model.weight)  # all inputs give the same losses at the start
    interrupted(tmp_path, model, (inputs, targets))
    with pytest.raises(ValueError, match=r"\(data differ\): give each its own"):
        resumed(tmp_path, model, (2 * inputs, targets))
    with pytest.raises(ValueError, match=r"\(step_size differ\)"):
        resumed(tmp_path, model, (inputs, targets), step_size=2e-4)
    with pytest.raises(ValueError, match="num_burnin_steps, preconditioner differ"):
        resumed(tmp_path, model, (inputs, targets), preconditioner=RMSProp(), num_burnin_steps=9)
    losses = EnsembleLosses(model, nn.MSELoss(), (inputs, targets))
    with pytest.raises(ValueError, match="friction, sampler differ"):
        run_chains(UnderdampedLangevin(losses, **SETTINGS, friction=1.0), SEEDS, 30, checkpoint=tmp_path)


def test_a_damaged_chain_is_named_and_starts_afresh(tmp_path: Path) -> None:
    model, data = linear_regression(60, 2, seed=0)
    interrupted(tmp_path, model, data)
    path = tmp_path / "chain_11.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.warns(CheckpointWarning, match=r"chain_11.pt is no readable checkpoint"):
        found = resumed(tmp_path, model, data)
    whole = run_chains(SGLD(EnsembleLosses(model, nn.MSELoss(), data), **SETTINGS), SEEDS, 30)
    torch.testing.assert_close(found.losses, whole.losses, rtol=1e-9, atol=1e-12)


def test_model_mode_and_global_randomness_stay_as_they_are() -> None:
    model, (inputs, targets) = small_network()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    losses = losses_of(model, (inputs, targets))
    run_chains(SGLD(losses, **SETTINGS), [1, 2], 5)
    assert torch.equal(random_state, torch.get_rng_state())
    assert model.training
    assert model[1].training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    expected = nn.CrossEntropyLoss(reduction="none")(model.eval()(inputs), targets)
    torch.testing.assert_close(losses.start_losses, expected.detach())  # chains are in eval mode


def test_frozen_parameters_do_not_move() -> None:
    model, data = small_network()
    model[0].requires_grad_(False)
    assert len(losses_of(model, data).start) == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_losses_that_are_no_mean_over_examples_are_refused() -> None:
    model, data = small_network()
    with pytest.raises(ValueError, match="reduction='mean'"):
        EnsembleLosses(model, nn.CrossEntropyLoss(reduction="sum"), data)
    with pytest.raises(ValueError, match="is a sum over examples"):
        EnsembleLosses(model, lambda outputs, targets: outputs.square().sum(), data)


def test_examples_of_different_shapes_are_refused_when_drawn() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    data = [(torch.zeros(2, length).long(), torch.zeros(2, length).long()) for length in (3, 4)]
    with pytest.raises(ValueError, match="pad them"):
        run_chains(SGLD(losses_of(model, data), **SETTINGS), [0, 1, 2], 5)


def test_hessian_product_against_autograd() -> None:
    model, data = small_network()
    losses = losses_of(model.double(), data)

    def loss_at(flat: Tensor) -> Tensor:
        named, rest = {}, flat
        for name, parameter in model.eval().named_parameters():
            named[name], rest = rest[: parameter.numel()].view_as(parameter), rest[parameter.numel() :]
        return nn.CrossEntropyLoss()(torch.func.functional_call(model, named, (data[0].double(),)), data[1])

    dense = torch.autograd.functional.hessian(loss_at, losses.start)
    vector = torch.arange(len(losses.start), dtype=FP64).sin()
    torch.testing.assert_close(losses.hessian_product(losses.start, losses.batch(None), vector), dense @ vector)


def test_fewer_chains_go_together_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = SGLD(losses_of(*small_network()), **SETTINGS)
    expected = run_chains(sampler, SEEDS, 8, chunk_size=2)
    whole, found_at = EnsembleLosses.losses_and_gradients, []

    def limited(own, positions: Tensor, *arguments, **options):
        found_at.append(len(positions))
        if len(positions) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(own, positions, *arguments, **options)

    monkeypatch.setattr(EnsembleLosses, "losses_and_gradients", limited)
    with pytest.warns(MemoryWarning, match="now 2 of 5 chains go together. Pass chunk_size"):
        found = run_chains(sampler, SEEDS, 8, chunk_size=5)
    assert torch.equal(found.losses, expected.losses)
    assert torch.equal(found.positions, expected.positions)
    assert max(found_at[2:]) == 2

    def none_left(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(EnsembleLosses, "losses_and_gradients", none_left)
    with pytest.warns(MemoryWarning), pytest.raises(MemoryError):
        run_chains(sampler, SEEDS, 8)
