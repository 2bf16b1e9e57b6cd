"""Samplers, and chains of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlab.files import write_atomically
from curvlab.iterate import Checkpoint, CheckpointWarning
from curvlab.problem.memory import MemoryWarning
from curvlab.sampling import SGLD, ChainsState, ChainTraces, RMSProp, UnderdampedLangevin, run_chains
from curvlab.training import EnsembleLosses
from tests.refusals import refuses, stopped
from tests.sampling.analytic_models import FP64, Polynomial, linear_regression, mean_output, no_inputs

# --- One step of every sampler against the recursion written out, and the limits that they must have
SETTINGS = {"step_size": 1e-3, "nbeta": 20.0, "localization": 3.0, "batch_size": 7}
SAMPLERS: dict[str, tuple[type[SGLD], dict[str, Any]]] = {
    "sgld": (SGLD, {}),
    "rmsprop": (SGLD, {"preconditioner": RMSProp(decay=0.9, damping=0.2), "num_burnin_steps": 4}),
    "averaged": (UnderdampedLangevin, {"friction": math.inf}),
    "underdamped": (UnderdampedLangevin, {"friction": 12.0}),
}


def sampler_of(kind: str, losses: EnsembleLosses, **changes: Any) -> SGLD:
    made, own = SAMPLERS[kind]
    return made(losses, **(SETTINGS | own | changes))


def quadratic(**changes: Any) -> EnsembleLosses:
    return EnsembleLosses(Polynomial((2,), product=False), mean_output, no_inputs())


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_steps_follow_the_recursion(kind: str) -> None:
    """Welling & Teh (2011); Li et al. (2016), Algorithm 1, without Γ; Leimkuhler & Matthews (2013), BAOAB."""
    model, (inputs, targets) = linear_regression(60, 2, seed=0)
    start = torch.cat([model.weight.detach().flatten(), model.bias.detach()])
    design = torch.cat([inputs, torch.ones(60, 1, dtype=FP64)], 1)
    sampler = sampler_of(kind, EnsembleLosses(model, nn.MSELoss(), (inputs, targets)))
    state = sampler.init(generators(3, 4))
    assert state.num_steps == 0
    position, moment, h = state.positions.clone(), torch.zeros(2, 3, dtype=FP64), math.sqrt(1e-3)
    momentum = None if state.momenta is None else state.momenta / h
    kept = 0.0 if kind == "averaged" else math.exp(-12.0 * h)
    for step in range(4):
        state, info = sampler.step(state)
        used = state.draws.used - 1
        for chain in range(2):
            rows = state.draws.indices[chain, used]
            x, y = design[rows], targets[rows, 0]
            residual, noise = x @ position[chain] - y, state.draws.noise[chain, used]
            assert info.losses[chain] == pytest.approx(float(residual.square().mean()), rel=1e-10)
            assert info.start_losses[chain] == pytest.approx(float((x @ start - y).square().mean()), rel=1e-10)
            slope = 2 * x.T @ residual / 7
            drift, metric = 20.0 * slope + 3.0 * (position[chain] - start), torch.ones(3, dtype=FP64)
            if momentum is not None:
                momentum[chain] -= h * drift
                position[chain] += h / 2 * momentum[chain]
                momentum[chain] = kept * momentum[chain] + math.sqrt(1 - kept**2) * noise / h
                position[chain] += h / 2 * momentum[chain]
                continue
            if kind == "rmsprop":  # V stands still after two steps of burn-in
                if step < 2:
                    moment[chain] = slope**2 if step == 0 else 0.9 * moment[chain] + 0.1 * slope**2
                metric = 1 / (0.2 + moment[chain].sqrt())
            position[chain] += -0.5e-3 * metric * drift + metric.sqrt() * noise
        torch.testing.assert_close(state.positions, position, rtol=1e-11, atol=1e-13)
    assert state.num_steps == 4


@pytest.mark.parametrize("kind", ["sgld", "averaged", "underdamped"])
def test_stationary_variance_on_a_quadratic_knows_the_step_size(kind: str) -> None:
    """ε κ = 2, half of the limit: SGLD doubles the variance, the two others keep it."""
    nbeta, localization, step_size = 40.0, 20.0, 0.02
    stiffness = 2 * nbeta + localization  # K = w²
    sampler = sampler_of(
        kind, quadratic(), nbeta=nbeta, localization=localization, step_size=step_size, batch_size=8
    )
    positions = run_chains(sampler, list(range(4000)), 60).positions
    exact = 1 / (stiffness * ((1 - step_size * stiffness / 4) if kind == "sgld" else 1))
    assert float(positions.var()) == pytest.approx(exact, rel=0.08)


@pytest.mark.parametrize("kind", ["sgld", "underdamped"])
def test_batches_raise_the_temperature_by_what_is_told(kind: str) -> None:
    """1 + m ε s²/4, s² the variance of a batch's gradient of U, m the reach; SGLD has the step's own besides."""

    class Noisy(nn.Module):  # of example ±1 the loss is h w²/2 ± b w
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1, dtype=FP64))

        def forward(self, signs: Tensor) -> Tensor:
            return 0.5 * self.w**2 + 3.0 * signs[:, 0] * self.w

    signs = torch.tensor([[1.0], [-1.0]] * 8, dtype=FP64)
    settings = {"nbeta": 10.0, "localization": 0.0, "batch_size": 1}
    step_size = 2e-3 if kind == "underdamped" else 5e-3
    losses = EnsembleLosses(Noisy(), mean_output, (signs, signs[:, 0]))
    sampler = sampler_of(kind, losses, step_size=step_size, **settings)
    variance = float(run_chains(sampler, list(range(3000)), 600).positions.var())
    added = sampler.reach * step_size * (10.0 * 3.0) ** 2 / 4
    assert added > 0.9
    own = 1 - step_size * 10.0 / 4 if kind == "sgld" else 1.0
    assert variance * 10.0 == pytest.approx((1 + added) / own, rel=0.1)


def test_less_friction_reaches_further() -> None:
    """A flat direction's variance after N steps is that of SGLD of `reach` times the step size."""
    found = {}
    for kind in ("sgld", "underdamped"):
        sampler = sampler_of(kind, quadratic(), nbeta=0.0, localization=1.0, step_size=1e-4, batch_size=8)
        assert sampler.reach == pytest.approx(1.0 if kind == "sgld" else 2 / (12 * 0.01), rel=0.01)
        variance = float(run_chains(sampler, list(range(2000)), 300).positions.var())
        found[kind] = variance, 1 - math.exp(-1e-4 * 300 * sampler.reach)
    for variance, expected in found.values():
        assert variance == pytest.approx(expected, rel=0.15)


def test_bad_settings() -> None:
    refuses("num_burnin_steps of at least 2, got 0", sampler_of, "rmsprop", quadratic(), num_burnin_steps=0)
    with pytest.raises(ValueError, match=r"friction must be positive, got 0.0: without friction"):
        sampler_of("underdamped", quadratic(), friction=0.0)


# --- Chains in chunks and threads, killed and resumed, on every form of data, and when memory runs out
CHAINS = {"step_size": 1e-4, "nbeta": 20.0, "localization": 3.0, "batch_size": 7}
SEEDS = [11, 12, 13, 14, 15]
SAMPLERS_OF_CHAINS = {
    "sgld": lambda losses: SGLD(losses, **CHAINS),
    "rmsprop": lambda losses: SGLD(losses, **CHAINS, preconditioner=RMSProp(), num_burnin_steps=10),
    "averaged": lambda losses: UnderdampedLangevin(losses, **CHAINS, friction=math.inf),
    "underdamped": lambda losses: UnderdampedLangevin(losses, **CHAINS, friction=30.0),
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
    sampler = SAMPLERS_OF_CHAINS["rmsprop"](losses_of(*small_network()))
    together = run_chains(sampler, SEEDS, 20, chunk_size=5)
    apart = run_chains(sampler, SEEDS, 20, chunk_size=chunk_size)
    for one, two in zip(apart.parts(), together.parts(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    alone = run_chains(sampler, SEEDS[3:4], 20)
    torch.testing.assert_close(alone.positions[0], together.positions[3], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", SAMPLERS_OF_CHAINS)
@pytest.mark.parametrize(("chunk_size", "later"), [(2, None), (2, 1), (5, 3)])
def test_killed_chains_end_at_the_same_numbers(
    kind: str, chunk_size: int, later: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers are drawn 8 steps ahead here, so that most of the later ones are drawn after the kill."""
    monkeypatch.setattr("curvlab.sampling.sgld._MAX_STEPS_AHEAD", 8)
    model, data = linear_regression(60, 2, seed=0)
    losses = EnsembleLosses(model, nn.MSELoss(), data)
    whole = run_chains(SAMPLERS_OF_CHAINS[kind](losses), SEEDS, 40)
    taken: list[int] = []

    def killed(state: ChainsState) -> None:
        taken.append(state.num_chains)
        if sum(taken) > 5 * 25:
            raise KeyboardInterrupt

    place = Checkpoint(tmp_path, every=13)
    with pytest.raises(KeyboardInterrupt):
        run_chains(
            SAMPLERS_OF_CHAINS[kind](losses), SEEDS, 40, chunk_size=chunk_size, checkpoint=place, callback=killed
        )
    assert f"chains_11_{chunk_size}.pt" in {path.name for path in tmp_path.iterdir()}
    steps: list[int] = []
    settings = {"chunk_size": later, "checkpoint": tmp_path, "callback": lambda s: steps.append(s.num_chains)}
    resumed = run_chains(SAMPLERS_OF_CHAINS[kind](losses), SEEDS, 40, **settings)
    assert sum(steps) <= 5 * 40 - 52
    for one, two in zip(resumed.parts(), whole.parts(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)
    assert not list(tmp_path.iterdir())  # what is done needs no file


def test_a_kill_while_files_are_saved_costs_no_digit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains that go on apart round otherwise: they are saved together."""
    sampler = SAMPLERS_OF_CHAINS["averaged"](losses_of(*small_network()))
    expected = run_chains(sampler, SEEDS, 40)
    written: list[Path] = []

    def killed(path: Path, content: bytes) -> None:
        written.append(path)
        if len(written) == 7:
            raise KeyboardInterrupt
        write_atomically(path, content)

    with monkeypatch.context() as patched:
        patched.setattr("curvlab.iterate.write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            run_chains(sampler, SEEDS, 40, checkpoint=Checkpoint(tmp_path, every=3))
    assert list(tmp_path.iterdir())
    found = run_chains(sampler, SEEDS, 40, checkpoint=tmp_path)
    for one, two in zip(found.parts(), expected.parts(), strict=True):
        assert torch.equal(one, two)


def interrupted(folder: Path, model: nn.Module, data: Any, *, steps: int = 20, **settings: Any) -> None:
    sampler = SGLD(EnsembleLosses(model, nn.MSELoss(), data), **(CHAINS | settings))
    stopped(steps, run_chains, sampler, SEEDS, 30, checkpoint=Checkpoint(folder, every=10))


def resumed(folder: Path, model: nn.Module, data: Any, num_steps: int = 30, **settings: Any) -> ChainTraces:
    sampler = SGLD(EnsembleLosses(model, nn.MSELoss(), data), **(CHAINS | settings))
    return run_chains(sampler, SEEDS, num_steps, checkpoint=folder)


@pytest.mark.parametrize("num_steps", [5, 50])
def test_a_killed_run_goes_on_to_another_length(num_steps: int, tmp_path: Path) -> None:
    model, data = linear_regression(60, 2, seed=0)
    interrupted(tmp_path, model, data)
    found = resumed(tmp_path, model, data, num_steps)
    assert found.losses.shape == (5, num_steps)
    whole = run_chains(SGLD(EnsembleLosses(model, nn.MSELoss(), data), **CHAINS), SEEDS, num_steps)
    torch.testing.assert_close(found.losses, whole.losses, rtol=1e-9, atol=1e-12)


def test_files_of_other_chains_are_refused(tmp_path: Path) -> None:
    inputs = torch.randn(50, 3, dtype=FP64, generator=torch.Generator().manual_seed(0))
    model, targets = nn.Linear(3, 1, bias=False).double(), torch.ones(50, 1)
    nn.init.zeros_(model.weight)  # all inputs give the same losses at the start
    interrupted(tmp_path, model, (inputs, targets))
    refuses(r"\(data differs?\): give each its own", resumed, tmp_path, model, (2 * inputs, targets))
    refuses(r"\(step_size differs?\)", resumed, tmp_path, model, (inputs, targets), step_size=2e-4)
    with pytest.raises(ValueError, match="num_burnin_steps, preconditioner differ"):
        resumed(tmp_path, model, (inputs, targets), preconditioner=RMSProp(), num_burnin_steps=9)
    losses = EnsembleLosses(model, nn.MSELoss(), (inputs, targets))
    with pytest.raises(ValueError, match="friction, sampler differ"):
        run_chains(UnderdampedLangevin(losses, **CHAINS, friction=1.0), SEEDS, 30, checkpoint=tmp_path)


def test_a_damaged_file_is_named_and_starts_afresh(tmp_path: Path) -> None:
    model, data = linear_regression(60, 2, seed=0)
    interrupted(tmp_path, model, data)
    path = tmp_path / "chains_11_5.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.warns(CheckpointWarning, match=r"chains_11_5.pt is no readable checkpoint"):
        found = resumed(tmp_path, model, data)
    whole = run_chains(SGLD(EnsembleLosses(model, nn.MSELoss(), data), **CHAINS), SEEDS, 30)
    torch.testing.assert_close(found.losses, whole.losses, rtol=1e-9, atol=1e-12)


def test_model_mode_and_global_randomness_stay_as_they_are() -> None:
    model, (inputs, targets) = small_network()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    losses = losses_of(model, (inputs, targets))
    run_chains(SGLD(losses, **CHAINS), [1, 2], 5)
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


def test_sums_over_examples_and_examples_of_different_shapes_are_refused() -> None:
    model, data = small_network()
    refuses("reduction='mean'", EnsembleLosses, model, nn.CrossEntropyLoss(reduction="sum"), data)
    refuses("is a sum over examples", EnsembleLosses, model, lambda outputs, targets: outputs.square().sum(), data)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    data = [(torch.zeros(2, length).long(), torch.zeros(2, length).long()) for length in (3, 4)]
    refuses("pad them", run_chains, SGLD(losses_of(model, data), **CHAINS), [0, 1, 2], 5)


def test_fewer_chains_go_together_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = SGLD(losses_of(*small_network()), **CHAINS)
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
