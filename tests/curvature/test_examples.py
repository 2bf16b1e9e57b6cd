"""Traces of single examples against dense fp64 Gauss-Newton blocks, one autograd row at a time."""

from __future__ import annotations

import pytest
import torch
from curvature_cases import LANGUAGE_LOSSES, Problem, language_problem, problem
from curvature_oracles import dense_gauss_newton, outputs
from torch import Tensor, nn

from curvlab.curvature import FisherOperator, GaussNewtonOperator, exact_traces, output_curvatures, sampled_traces

LAYERED = ["linear", "mlp_tanh", "mlp_relu", "conv", "linear-ce_sum", "linear-ce_ignore", "linear-ce_smoothing"]
LAYERED += ["linear-mse", "linear-mse_sum", "linear-bce", "conv-bce", "conv-mse", "conv-ce_ignore"]


def named(name: str) -> Problem:
    model, _, loss = name.partition("-")
    return problem(model, loss or "ce")


def dense_traces(one: Problem) -> Tensor:
    """tr(G_i) with mean tr(G): the sum over example i, as the loss of reduction="sum" has it, N/n times."""
    whole = torch.trace(dense_gauss_newton(*one_tuple(one)))
    summed = summing(one.loss)
    parts = []
    for n in range(len(one.targets)):
        part = one.part(n)
        ignored = isinstance(summed, nn.CrossEntropyLoss) and bool((part.targets == summed.ignore_index).all())
        block = (
            torch.zeros(()).double()
            if ignored
            else torch.trace(dense_gauss_newton(part.model, summed, part.inputs, part.targets))
        )
        parts.append(block)
    traces = torch.stack(parts)
    return traces * whole / traces.mean()  # the scale from the loss as it is


def one_tuple(one: Problem) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    return one.model, one.loss, one.inputs, one.targets


def summing(loss: nn.Module) -> nn.Module:
    if isinstance(loss, nn.CrossEntropyLoss):
        return nn.CrossEntropyLoss(
            reduction="sum", ignore_index=loss.ignore_index, label_smoothing=loss.label_smoothing
        )
    return type(loss)(reduction="sum")


@pytest.mark.parametrize("name", LAYERED)
@pytest.mark.parametrize("batch_size", [2, 512])
def test_exact_traces_are_those_of_dense_blocks(name: str, batch_size: int) -> None:
    one = named(name)
    traces = exact_traces(GaussNewtonOperator(*one, batch_size=batch_size))
    torch.testing.assert_close(traces, dense_traces(one), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(traces.mean(), torch.trace(dense_gauss_newton(*one_tuple(one))), rtol=1e-10, atol=0)


def test_activations_in_place_change_nothing() -> None:
    one = named("mlp_relu")
    model = nn.Sequential(*[nn.ReLU(inplace=True) if isinstance(m, nn.ReLU) else m for m in one.model])
    expected = exact_traces(GaussNewtonOperator(*one))
    torch.testing.assert_close(
        exact_traces(GaussNewtonOperator(model, one.loss, (one.inputs, one.targets))), expected
    )


@pytest.mark.parametrize("name", ["layer_norm", "frozen", "tied", "unused", "attention", "recurrent"])
def test_exact_traces_refuse_what_no_layer_holds(name: str) -> None:
    with pytest.raises(ValueError, match="Use sampled_traces"):
        exact_traces(GaussNewtonOperator(*named(name)))


def test_only_the_whole_gauss_newton_matrix_has_them() -> None:
    one = named("mlp_tanh")
    with pytest.raises(TypeError, match="pass a GaussNewtonOperator, got FisherOperator"):
        output_curvatures(FisherOperator(*one, kind="empirical"))
    with pytest.raises(ValueError, match="not a sample"):
        exact_traces(GaussNewtonOperator(*one).sample(2))
    torch.testing.assert_close(exact_traces(FisherOperator(*one)), exact_traces(GaussNewtonOperator(*one)))
    with pytest.raises(ValueError, match="num_draws must be at least 1"):
        sampled_traces(GaussNewtonOperator(*one), num_draws=0)


@pytest.mark.parametrize(
    "name",
    [
        "conv",
        "layer_norm",
        "frozen",
        "tied",
        "recurrent",
        "unused",
        "mlp_tanh-mse",
        "linear-bce",
        "conv-ce_ignore",
    ],
)
def test_sampled_traces_are_unbiased(name: str, generator: torch.Generator) -> None:
    one = named(name)
    op = GaussNewtonOperator(*one)
    blocks = torch.stack([sampled_traces(op, num_draws=20, generator=generator) for _ in range(20)])
    deviations = blocks.std(0) / len(blocks) ** 0.5
    expected = dense_traces(one)
    assert bool(((blocks.mean(0) - expected).abs() <= 4.5 * deviations + 1e-9 * expected).all())
    assert float((deviations / expected.clamp(min=1e-12))[expected > 0].max()) < 0.25  # it could have failed


@pytest.mark.parametrize("loss", list(LANGUAGE_LOSSES))
def test_sampled_traces_of_sequences(loss: str, generator: torch.Generator) -> None:
    """One gradient norm of a sequence, labels drawn token by token, is unbiased for the sum over its tokens."""
    one = language_problem(loss)
    op = GaussNewtonOperator(*one)
    blocks = torch.stack([sampled_traces(op, num_draws=20, generator=generator) for _ in range(20)])
    expected = dense_traces(one)
    deviations = blocks.std(0) / len(blocks) ** 0.5
    assert bool(((blocks.mean(0) - expected).abs() <= 4.5 * deviations + 1e-9 * expected.max()).all())
    assert float(expected[2]) == 0  # every token is ignored
    assert float(blocks[:, 2].max()) == 0


def test_one_draw_tells_of_confident_examples(generator: torch.Generator) -> None:
    """Where p is near 1, labels drawn from the model leave nearly all of the trace to rare draws; ours do not."""
    one = named("mlp_tanh")
    with torch.no_grad():
        one.model[-1].weight *= 20
    op = GaussNewtonOperator(*one)
    expected = dense_traces(one)
    assert float(outputs(one.model, one.inputs).detach().softmax(-1).amax()) > 1 - 1e-6
    draws = torch.stack([sampled_traces(op, generator=generator) for _ in range(400)])
    torch.testing.assert_close(draws.mean(0), expected, rtol=0.15, atol=0)
    assert float((draws.std(0) / expected).max()) < 1.5  # of labels: sqrt(1 / rare p), above 100


def test_order_is_that_of_examples_drawn_by_number() -> None:
    """A list of batches, and a loader: traces belong to the numbers that `select` takes."""
    one = named("conv")
    data = [(one.inputs[:2], one.targets[:2]), (one.inputs[2:], one.targets[2:])]
    torch.testing.assert_close(
        exact_traces(GaussNewtonOperator(one.model, one.loss, data)), exact_traces(GaussNewtonOperator(*one))
    )
    dataset = torch.utils.data.TensorDataset(one.inputs, one.targets)
    loader = torch.utils.data.DataLoader(dataset, batch_size=2)
    op = GaussNewtonOperator(one.model, one.loss, loader)
    torch.testing.assert_close(exact_traces(op), exact_traces(GaussNewtonOperator(*one)))


@pytest.mark.parametrize("name", ["linear", "linear-ce_sum", "conv-ce_ignore", "linear-bce", "layer_norm"])
def test_output_curvatures_are_traces_of_output_hessians(name: str) -> None:
    one = named(name)
    op = GaussNewtonOperator(*one)
    h = outputs(one.model, one.inputs).detach()
    if isinstance(one.loss, nn.CrossEntropyLoss):
        expected = (1 - h.softmax(-1).square().sum(-1)) * (one.targets != one.loss.ignore_index)
    else:
        expected = (h.sigmoid() * (1 - h.sigmoid())).sum(-1)
    torch.testing.assert_close(output_curvatures(op), expected * len(h) / op.divisor, rtol=1e-12, atol=0)


def test_output_curvatures_of_sequences() -> None:
    one = language_problem("mean")
    h = outputs(one.model, one.inputs).detach()
    kept = one.targets != -100
    expected = ((1 - h.softmax(-1).square().sum(-1)) * kept).sum(1) * len(h) / kept.sum()
    torch.testing.assert_close(output_curvatures(GaussNewtonOperator(*one)), expected, rtol=1e-12, atol=1e-15)
