"""One step against the recursion written out, and the limits that SGLD must have."""

from __future__ import annotations

import math

import pytest
import torch
from analytic_models import FP64, Polynomial, linear_regression, mean_output, no_inputs
from torch import Tensor, nn

from curvlab.problem.memory import MemoryWarning
from curvlab.sampling import SGLD, SGLDState, run_chains
from curvlab.training import EnsembleLosses


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def parts() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return linear_regression(60, 2, seed=0)


def settings(**changes: float) -> dict:
    return {"step_size": 1e-3, "nbeta": 20.0, "localization": 3.0, "batch_size": 7} | changes


def test_steps_follow_the_recursion() -> None:
    model, (inputs, targets) = parts()
    start = torch.cat([model.weight.detach().flatten(), model.bias.detach()])
    design = torch.cat([inputs, torch.ones(60, 1, dtype=FP64)], 1)
    sampler = SGLD(EnsembleLosses(model, nn.MSELoss(), (inputs, targets)), **settings())
    state = sampler.init(generators(3, 4))
    position = state.positions.clone()
    for _ in range(3):
        state, info = sampler.step(state)
        used = state.draws.used - 1
        for chain in range(2):
            rows = state.draws.indices[chain, used]
            x, y = design[rows], targets[rows, 0]
            residual = x @ position[chain] - y
            assert info.losses[chain] == pytest.approx(float(residual.square().mean()), rel=1e-10)
            assert info.start_losses[chain] == pytest.approx(float((x @ start - y).square().mean()), rel=1e-10)
            drift = 20.0 * 2 * x.T @ residual / 7 + 3.0 * (position[chain] - start)
            position[chain] = position[chain] - 0.5e-3 * drift + state.draws.noise[chain, used]
        torch.testing.assert_close(state.positions, position, rtol=1e-12, atol=1e-14)


def test_noise_has_variance_step_size_and_chains_are_independent() -> None:
    model = Polynomial((2,) * 500, product=False)
    sampler = SGLD(EnsembleLosses(model, mean_output, no_inputs()), **settings(nbeta=0.0, localization=0.0))
    state = sampler.step(sampler.init(generators(1, 2)))[0]
    assert state.positions.var(1).tolist() == pytest.approx([1e-3, 1e-3], rel=0.2)
    assert abs(torch.corrcoef(state.positions)[0, 1]) < 0.2


def test_stationary_variance_on_a_quadratic_knows_the_step_size() -> None:
    nbeta, localization, step_size = 40.0, 20.0, 0.02
    stiffness = 2 * nbeta + localization  # K = w²
    sampler = SGLD(
        EnsembleLosses(Polynomial((2,), product=False), mean_output, no_inputs()),
        **settings(nbeta=nbeta, localization=localization, step_size=step_size),
    )
    positions = run_chains(sampler, list(range(4000)), 60).positions
    exact = 1 / (stiffness * (1 - step_size * stiffness / 4))
    assert exact > 1.9 / stiffness
    assert float(positions.var()) == pytest.approx(exact, rel=0.08)


def test_without_loss_the_localization_alone_decides() -> None:
    sampler = SGLD(
        EnsembleLosses(Polynomial((2,), product=False), mean_output, no_inputs()),
        **settings(nbeta=0.0, localization=50.0, step_size=1e-3),
    )
    assert float(run_chains(sampler, list(range(3000)), 150).positions.var()) == pytest.approx(1 / 50, rel=0.09)


def small_network() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch_generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.5), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5, generator=torch_generator)
    inputs = torch.randn(50, 6, generator=torch_generator)
    return model, (inputs, torch.randint(3, (50,), generator=torch_generator))


@pytest.mark.parametrize("threads_from", [10, 10**9], ids=["threads", "one thread"])
@pytest.mark.parametrize("chunk_size", [1, 3])
def test_chunks_and_threads_change_nothing(
    chunk_size: int, threads_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("curvlab.sampling.chains.MIN_PARAMETERS_FOR_THREADS", threads_from)
    monkeypatch.setattr("curvlab.sampling.chains._num_threads", lambda: 2)
    model, data = small_network()
    sampler = SGLD(EnsembleLosses(model, nn.CrossEntropyLoss(), data), **settings(step_size=1e-4))
    seeds = [11, 12, 13, 14, 15]
    together = run_chains(sampler, seeds, 20, chunk_size=5)
    apart = run_chains(sampler, seeds, 20, chunk_size=chunk_size)
    torch.testing.assert_close(apart.losses, together.losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(apart.positions, together.positions, rtol=1e-4, atol=1e-5)
    alone = run_chains(sampler, seeds[3:4], 20)
    torch.testing.assert_close(alone.positions[0], together.positions[3], rtol=1e-4, atol=1e-5)


def test_model_mode_and_global_randomness_stay_as_they_are() -> None:
    model, data = small_network()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    sampler = SGLD(EnsembleLosses(model, nn.CrossEntropyLoss(), data), **settings())
    run_chains(sampler, [1, 2], 5)
    assert torch.equal(random_state, torch.get_rng_state())
    assert model.training
    assert model[1].training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_losses_are_those_of_eval_mode() -> None:
    model, (inputs, targets) = small_network()
    losses = EnsembleLosses(model.train(), nn.CrossEntropyLoss(), (inputs, targets))
    expected = nn.CrossEntropyLoss(reduction="none")(model.eval()(inputs), targets)
    torch.testing.assert_close(losses.start_losses, expected.detach())


def test_frozen_parameters_do_not_move() -> None:
    model, data = small_network()
    model[0].requires_grad_(False)
    losses = EnsembleLosses(model, nn.CrossEntropyLoss(), data)
    assert len(losses.start) == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("form", ["dataset", "batches", "mapping"])
def test_all_forms_of_data_give_the_same_chains(form: str) -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_network()[0]

        def forward(self, features: Tensor) -> Tensor:
            return self.inner(features)

    model, (inputs, targets) = small_network()
    data = {
        "dataset": [(x, y) for x, y in zip(inputs, targets, strict=True)],
        "batches": [(inputs[:30], targets[:30]), (inputs[30:], targets[30:])],
        "mapping": ({"features": inputs}, targets),
    }[form]
    if form == "dataset":
        data = _Examples(data)
    expected = run_chains(
        SGLD(EnsembleLosses(model, nn.CrossEntropyLoss(), (inputs, targets)), **settings()), [1, 2], 5
    )
    other = Mapped() if form == "mapping" else model
    found = run_chains(SGLD(EnsembleLosses(other, nn.CrossEntropyLoss(), data), **settings()), [1, 2], 5)
    torch.testing.assert_close(found.positions, expected.positions, rtol=1e-5, atol=1e-6)


class _Examples(torch.utils.data.Dataset):
    def __init__(self, examples: list[tuple[Tensor, Tensor]]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.examples[index]


def test_a_function_as_loss_equals_the_module() -> None:
    model, data = small_network()
    module = EnsembleLosses(model, nn.CrossEntropyLoss(), data)
    function = EnsembleLosses(model, nn.functional.cross_entropy, data)
    torch.testing.assert_close(module.start_losses, function.start_losses)
    position = module.start[None] + 0.1
    batch = module.batch(torch.arange(9)[None])
    for a, b in zip(
        module.losses_and_gradients(position, batch, shared=False)[1],
        function.losses_and_gradients(position, batch, shared=False)[1],
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_losses_that_are_no_mean_over_examples_are_refused() -> None:
    model, data = small_network()
    with pytest.raises(ValueError, match="reduction='mean'"):
        EnsembleLosses(model, nn.CrossEntropyLoss(reduction="sum"), data)
    with pytest.raises(ValueError, match=r"is a sum over examples.*return the mean"):
        EnsembleLosses(model, lambda outputs, targets: outputs.square().sum(), data)


def test_examples_of_different_shapes_are_refused_when_drawn() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    data = [(torch.zeros(2, length).long(), torch.zeros(2, length).long()) for length in (3, 4)]
    sampler = SGLD(EnsembleLosses(model, nn.CrossEntropyLoss(), data), **settings(batch_size=3))
    with pytest.raises(ValueError, match="pad them"):
        run_chains(sampler, [0, 1, 2], 5)


def test_hessian_product_against_autograd() -> None:
    model, data = small_network()
    losses = EnsembleLosses(model.double(), nn.CrossEntropyLoss(), data)

    def loss_at(flat: Tensor) -> Tensor:
        named, rest = {}, flat
        for name, parameter in model.eval().named_parameters():
            named[name], rest = rest[: parameter.numel()].view_as(parameter), rest[parameter.numel() :]
        return nn.CrossEntropyLoss()(torch.func.functional_call(model, named, (data[0].double(),)), data[1])

    dense = torch.autograd.functional.hessian(loss_at, losses.start)
    vector = torch.arange(len(losses.start), dtype=FP64).sin()
    torch.testing.assert_close(losses.hessian_product(losses.start, losses.batch(None), vector), dense @ vector)


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"step_size": 0.0}, "step_size"), ({"nbeta": -1.0}, "nbeta"), ({"batch_size": 0}, "batch_size")],
)
def test_bad_settings(changes: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SGLD(EnsembleLosses(*parts_with_loss()), **settings(**changes))


def parts_with_loss() -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
    model, data = parts()
    return model, nn.MSELoss(), data


def test_state_says_how_many_steps_were_taken() -> None:
    sampler = SGLD(EnsembleLosses(*parts_with_loss()), **settings())
    state: SGLDState = sampler.init(generators(0))
    assert state.num_steps == 0
    assert sampler.step(state)[0].num_steps == 1
    assert math.isfinite(float(state.positions.sum()))


def test_fewer_chains_go_together_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = small_network()
    losses = EnsembleLosses(model, nn.CrossEntropyLoss(), data)
    sampler = SGLD(losses, **settings(step_size=1e-4))
    seeds = [11, 12, 13, 14, 15]
    expected = run_chains(sampler, seeds, 8, chunk_size=2)
    whole, found_at = EnsembleLosses.losses_and_gradients, []

    def limited(own, positions: Tensor, *arguments, **options):
        found_at.append(len(positions))
        if len(positions) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(own, positions, *arguments, **options)

    monkeypatch.setattr(EnsembleLosses, "losses_and_gradients", limited)
    with pytest.warns(MemoryWarning, match="now 2 of 5 chains go together. Pass chunk_size"):
        found = run_chains(sampler, seeds, 8, chunk_size=5)
    assert torch.equal(found.losses, expected.losses)
    assert torch.equal(found.positions, expected.positions)
    assert max(found_at[2:]) == 2
    monkeypatch.setattr(
        EnsembleLosses, "losses_and_gradients", lambda *_, **__: (_ for _ in ()).throw(MemoryError)
    )
    with pytest.warns(MemoryWarning), pytest.raises(MemoryError):
        run_chains(sampler, seeds, 8)
