"""Which models are functions of single examples: modes, chance, state, frozen parameters, dtypes, NaN."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.testing import assert_close

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator
from curvlab.influence import per_example_gradients
from curvlab.problem import ModelFunction
from curvlab.sampling import estimate_llc
from tests.curvature.curvature_cases import convolutional, mlp, normal, problem, randomised
from tests.curvature.curvature_oracles import flat
from tests.refusals import refuses

OPERATORS = [GaussNewtonOperator, HessianOperator, FisherOperator]
every_operator = pytest.mark.parametrize("operator", OPERATORS)
CLASSES = torch.tensor([0, 1, 2, 0, 1])


def data(*shape: int) -> tuple[Tensor, Tensor]:
    return normal(*shape)(torch.Generator().manual_seed(0)), CLASSES


def multiply(operator, model: nn.Module, pair: tuple[Tensor, Tensor], num_columns: int = 1) -> Tensor:
    op = operator(model, nn.CrossEntropyLoss(), pair)
    return op @ op.randn(num_columns, torch.Generator().manual_seed(0))


def above_zero() -> nn.Linear:
    linear = nn.Linear(4, 3)
    nn.init.constant_(linear.bias, 100.0)
    return linear


class FunctionalDropout(nn.Module):
    """Dropout by the function, as in many language models."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(nn.functional.dropout(x, 0.5, training=self.training))


class DroppingAttention(nn.Module):
    """Dropout that is no module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0].mean(1)


@every_operator
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        pytest.param(lambda: convolutional(batch_norm=True), (1, 4, 4), id="batch norm"),
        pytest.param(lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), (4,), id="dropout"),
        pytest.param(DroppingAttention, (3, 4), id="attention with dropout"),
        pytest.param(FunctionalDropout, (4,), id="functional dropout"),
        pytest.param(lambda: nn.Sequential(above_zero(), nn.RReLU()), (4,), id="random slopes, and none drawn"),
        pytest.param(
            lambda: nn.Sequential(nn.InstanceNorm2d(1, track_running_stats=True), nn.Flatten(), nn.Linear(16, 3)),
            (1, 4, 4),
            id="instance norm with running statistics",
        ),
    ],
)
@pytest.mark.parametrize("num_columns", [1, 3])
def test_train_mode_is_refused_where_it_matters(operator, build, shape: tuple[int, ...], num_columns: int) -> None:
    model = build().double().train()
    before, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    refuses(r"model\.eval\(\)", multiply, operator, model, data(*shape), num_columns)
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert multiply(operator, model.eval(), data(*shape)).isfinite().all()


@every_operator
@pytest.mark.parametrize(
    "model",
    [
        mlp(nn.Tanh()),
        nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.0)),
        nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)),
        nn.Sequential(nn.Linear(4, 3), nn.Unflatten(1, (1, 3)), nn.InstanceNorm1d(1), nn.Flatten()),
    ],
)
def test_train_mode_is_accepted_where_it_changes_nothing(operator, model: nn.Module) -> None:
    model = model.double()
    training = multiply(operator, model.train(), data(4))
    assert model.training
    assert_close(training, multiply(operator, model.eval(), data(4)))


@every_operator
def test_batch_norm_without_running_statistics_couples_examples_in_every_mode(operator) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)).double().eval()
    refuses("whole batch: give it running statistics", multiply, operator, model, data(4))


class Recomputing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False)


class OwnSine(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * context.saved_tensors[0].cos()


class Sine(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return OwnSine.apply(super().forward(x))


class Packing(nn.GRU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.utils.rnn.pack_padded_sequence(x, [5] * len(x), batch_first=True))[1][0]


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


CHAINS = {
    "num_chains": 2,
    "num_draws": 2,
    "num_burnin_steps": 2,
    "batch_size": 2,
    "step_size": 1e-4,
    "generator": 0,
}


@pytest.mark.parametrize(
    ("model", "what"), [(Recomputing(), "checkpoints activations"), (Counting(), "Counting writes into a tensor")]
)
def test_copies_of_such_a_model_say_so_too(model: nn.Module, what: str) -> None:
    refuses(what, estimate_llc, model, nn.CrossEntropyLoss(), data(4), **CHAINS, error=NotImplementedError)


@pytest.mark.parametrize(
    ("model", "inputs", "what"),
    [
        (Recomputing(), torch.randn(8, 4), r"Recomputing checkpoints activations: turn that off"),
        (Sine(4, 3), torch.randn(8, 4), r"Sine has an autograd\.Function of its own: give it setup_context"),
        (
            nn.Sequential(nn.Embedding(5, 3, max_norm=1.0)),
            torch.arange(8) % 5,
            r"'0' \(Embedding\) shortens rows .* set its max_norm = None first",
        ),
        (nn.Sequential(nn.LazyLinear(3)), torch.randn(8, 4), r"lazy parameters, .* run a batch through it first"),
        (Packing(4, 3, batch_first=True), torch.randn(8, 5, 4), r"Packing packs sequences.* pass them padded"),
    ],
)
def test_a_forward_that_is_no_function_to_torch_says_what_to_change(
    model: nn.Module, inputs: Tensor, what: str
) -> None:
    with pytest.raises((NotImplementedError, ValueError), match=what):
        per_example_gradients(model, nn.CrossEntropyLoss(), (inputs, torch.arange(8) % 3))


@every_operator
def test_switching_to_train_mode_after_construction_is_noticed(operator) -> None:
    model = convolutional(batch_norm=True).double().eval()
    op = operator(model, nn.CrossEntropyLoss(), data(1, 4, 4))
    model.train()
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        op @ op.randn(1, torch.Generator())


class Noisy(nn.Module):
    """Random in every mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + torch.randn_like(x))


@every_operator
def test_a_model_that_draws_in_eval_mode_is_refused(operator) -> None:
    model = Noisy().double().eval()
    random_state = torch.get_rng_state()
    refuses(r"random numbers in eval mode.*must not sample", multiply, operator, model, data(4))
    assert torch.equal(torch.get_rng_state(), random_state)


def test_buffers_that_change_at_each_call_are_noticed_and_left_alone() -> None:
    model = spectral_norm(nn.Linear(4, 3)).double().train()  # a step of the power iteration at each call
    before = copy.deepcopy(model.state_dict())
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), data(4), jvp="finite_difference")
    with pytest.raises(ValueError, match=r"buffer '.*_u'.*train mode.*model\.eval\(\)"):
        op @ op.randn(1, torch.Generator())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.eval()
    assert (op @ op.randn(1, torch.Generator())).isfinite().all()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("width", [4, 3])  # a model of width 3 does not fit the data
def test_settings_of_torch_are_restored_even_after_an_error(enabled: bool, width: int) -> None:
    fast, flash = torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.flash_sdp_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        with nullcontext() if width == 4 else pytest.raises(ValueError, match="Linear does not take"):
            multiply(GaussNewtonOperator, nn.Linear(width, 3).double(), data(4))
        assert torch.backends.mha.get_fastpath_enabled() is enabled
        assert torch.backends.cuda.flash_sdp_enabled() is flash
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


# -------------------------------------------------------------------------------------- parameters
@every_operator
def test_frozen_parameters_leave_a_principal_submatrix(operator) -> None:
    case = problem("mlp_tanh", "ce")
    whole = operator(*case).to_dense()
    kept = flat([torch.full_like(p, name != "2.weight") for name, p in case.model.named_parameters()]).bool()
    case.model[2].weight.requires_grad_(False)
    assert_close(operator(*case).to_dense(), whole[kept][:, kept])


@every_operator
def test_the_operator_follows_the_model_as_it_is_trained_in_place(operator) -> None:
    case = problem("mlp_tanh", "mse")
    op = operator(*case)
    before = op.to_dense()
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.mul_(0.5)
    assert not torch.allclose(op.to_dense(), before)
    assert_close(op.to_dense(), operator(*case).to_dense())


@pytest.mark.parametrize("settings", [{"padding_idx": 0}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str)
@pytest.mark.parametrize("operator", [GaussNewtonOperator, HessianOperator])
def test_what_changes_an_embeddings_gradients_alone_is_set_aside(operator, settings: dict[str, Any]) -> None:
    tokens = torch.tensor([[0, 1], [2, 0], [3, 4], [5, 5], [0, 0]])

    def build(**settings: Any) -> nn.Module:
        model = nn.Sequential(nn.Embedding(6, 4, **settings), nn.Flatten(), nn.Linear(8, 3))
        return randomised(model, torch.Generator().manual_seed(0))

    ours, plain = (operator(build(**own), nn.CrossEntropyLoss(), (tokens, CLASSES)) for own in (settings, {}))
    assert_close(ours.to_dense(), plain.to_dense())
    assert settings.items() <= vars(ours.function.model[0]).items()
    with pytest.raises(ValueError, match=r"from 5 to .*index out of range"):
        operator(ours.function.model, nn.CrossEntropyLoss(), (tokens + 5, CLASSES)).to_dense()
    assert settings.items() <= vars(ours.function.model[0]).items()


class Registered(nn.Module):
    """A parameter that stands among the buffers as well, and a buffer that the first forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("same", self.linear.weight)
        self.register_buffer("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.new_full((3,), 2.0)
        return self.scale * self.linear(x)


@every_operator
def test_buffers_in_train_mode_leave_parameters_and_new_buffers_alone(operator) -> None:
    model = Registered().double().train()
    function = ModelFunction(model)
    weight, bias = function.parameters
    assert_close(function((3 * weight, bias), data(4)[0]), 2 * (data(4)[0] @ (3 * weight).T + bias))
    assert_close(multiply(operator, model, data(4)), multiply(operator, model.eval(), data(4)))


class OwnSetting(nn.Embedding):
    padding_idx = 0

    def __init__(self) -> None:
        super().__init__(6, 4)
        del self.padding_idx


def test_settings_of_an_embeddings_class_are_set_aside_too() -> None:
    pair = torch.tensor([0, 2, 3, 5, 0]), CLASSES
    own, plain = (nn.Sequential(table, nn.Linear(4, 3)).double() for table in (OwnSetting(), nn.Embedding(6, 4)))
    plain.load_state_dict(own.state_dict())
    assert_close(multiply(GaussNewtonOperator, own, pair), multiply(GaussNewtonOperator, plain, pair))
    assert "padding_idx" not in vars(own[0])


class Centred(nn.Linear):
    """Statistics of the batch by hand, which no type of module tells."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Drifting(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.calls * super().forward(x)


@every_operator
@pytest.mark.parametrize("model", [Centred(4, 3), Drifting(4, 3)], ids=["centred", "drifting"])
def test_a_model_whose_examples_meet_is_refused(operator, model: nn.Module) -> None:
    inputs, targets = data(4)
    for form in ((inputs, targets), [(inputs[:3], targets[:3]), (inputs[3:], targets[3:])]):
        with pytest.raises(ValueError, match="outputs of an example change with the other examples of its batch"):
            operator(model, nn.CrossEntropyLoss(), form)


@every_operator
def test_parameters_may_be_replaced_by_others_of_their_shape(operator) -> None:
    case = problem("mlp_tanh", "mse")
    op = operator(*case)
    case.model[0].weight = nn.Parameter(0.3 * case.model[0].weight.detach())
    other = {name: 0.7 * value for name, value in case.model[2].state_dict().items()}
    case.model[2].load_state_dict(other, assign=True)
    assert_close(op.to_dense(), operator(*case).to_dense())


class Twice(nn.Module):
    """A layer under one name, used twice."""

    def __init__(self, layer: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.layer, self.last = layer, last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(torch.tanh(self.layer(x))))


@every_operator
def test_a_module_under_two_names_is_one_and_keeps_its_parameters(operator) -> None:
    layer, last = nn.Linear(4, 4), nn.Linear(4, 3)
    both = nn.Sequential(layer, nn.Tanh(), layer, last)
    assert_close(multiply(operator, both, data(4)), multiply(operator, Twice(layer, last), data(4)))
    gradients = [per_example_gradients(m, nn.CrossEntropyLoss(), data(4)) for m in (both, Twice(layer, last))]
    assert_close(*gradients)
    settings = CHAINS | {"num_draws": 8, "batch_size": 5}
    chains = [
        estimate_llc(m, nn.CrossEntropyLoss(), data(4), **settings).losses for m in (both, Twice(layer, last))
    ]
    assert_close(*chains)
    assert isinstance(layer.weight, nn.Parameter)


CHANGES = {
    "shape": (lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(3, 5).double())), r"\(3, 4\).*\(3, 5\)"),
    "dtype": (lambda m: m.float(), "float64.*float32"),
    "name": (lambda m: delattr(m, "bias"), "no parameter 'bias'"),
}


@every_operator
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_no_longer_fits_is_reported(operator, change: str) -> None:
    op = operator(*problem("linear", "ce"))
    CHANGES[change][0](op.function.model)
    with pytest.raises(ValueError, match=f"{CHANGES[change][1]}.*build the operator"):
        op @ torch.zeros(15).double()


@every_operator
def test_a_parameter_unfrozen_later_is_a_constant(operator) -> None:
    case = problem("frozen", "ce")
    op = operator(*case)
    before = op.to_dense()
    case.model.requires_grad_(True)
    after = op.to_dense()
    assert_close(after, before, rtol=1e-12, atol=1e-14)  # sums may run in another order
    assert not after.requires_grad


@every_operator
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_kept_and_close(operator, dtype: torch.dtype) -> None:
    case = problem("mlp_tanh", "ce")
    reference = operator(*case).to_dense()
    low = operator(case.model.to(dtype), case.loss, (case.inputs, case.targets)).to_dense()
    assert low.dtype == dtype
    tolerance = 20 * torch.finfo(dtype).eps * reference.abs().max().item()
    assert_close(low.double(), reference, rtol=0, atol=tolerance)


# --------------------------------------------------------------------------------------------- NaN
@every_operator
@pytest.mark.parametrize("num_columns", [1, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["parameter", "input"])
def test_non_finite_outputs_are_reported_with_what_to_check(
    operator, num_columns: int, bad: float, place: str
) -> None:
    case = problem("linear", "ce")
    if place == "parameter":
        with torch.no_grad():
            case.model.weight[0, 0] = bad
    else:
        case.inputs[3, 0] = bad
    op = operator(*case)
    with pytest.raises(ValueError, match=r"NaN or infinity.*check"):
        op @ op.randn(num_columns, torch.Generator())


def test_non_finite_outputs_are_reported_by_every_kind() -> None:
    case = problem("linear", "ce")
    case.inputs[3, 0] = float("nan")
    refuses(r"rows \[3\].*check", FisherOperator, *case, kind="monte_carlo", generator=torch.Generator())
    for op in (FisherOperator(*case, kind="empirical"), GaussNewtonOperator(*case, jvp="finite_difference")):
        with pytest.raises(ValueError, match=r"rows \[3\].*check"):
            op @ op.randn(1, torch.Generator())
