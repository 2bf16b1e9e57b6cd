"""Results print two lines without tensors, and a small table in a notebook; solutions draw their residuals."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from curvlab.curvature import GaussNewtonOperator, example_importance
from curvlab.influence import influence, self_influence
from curvlab.linalg import DenseOperator, identity
from curvlab.problem import Problem
from curvlab.shown import Shown, Summary
from curvlab.solvers import ConjugateGradient, Direct
from curvlab.spectrum import hutchinson_trace, sketch_eigenvalues, spectral_density, top_eigenvalues
from curvlab.training import RunLength
from tests.refusals import refuses


class Toy(Shown):
    def summary(self) -> Summary:
        return Summary("a <b>", "1 ± 0.1", "of 3", ("2 products",), ("too few & too small",))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def operator() -> DenseOperator:
    factor = torch.randn(30, 30, generator=generator(), dtype=torch.float64)
    return DenseOperator(factor @ factor.T / 30)


def systems(columns: int) -> torch.Tensor:
    return torch.randn(30, columns, generator=generator(), dtype=torch.float64)


def network() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double().eval(), (torch.randn(9, 4).double(), torch.arange(9) % 3)


RESULTS: dict[str, Any] = {
    "estimate": lambda: hutchinson_trace(operator(), num_matvecs=8, generator=generator()),
    "largest eigenvalues": lambda: top_eigenvalues(operator(), 3, generator=generator()),
    "by a sketch": lambda: sketch_eigenvalues(operator(), 2, sketch_size=10, generator=generator()),
    "density": lambda: spectral_density(operator(), num_probes=2, num_steps=5, generator=generator()),
    "solution": lambda: ConjugateGradient().solve(operator() + identity, systems(2)),
    "influence scores": lambda: influence(
        network()[0], nn.CrossEntropyLoss(), network()[1], network()[1], damping=1.0
    ),
    "self-influence": lambda: self_influence(network()[0], nn.CrossEntropyLoss(), network()[1], damping=1.0),
}


def test_several_problems_take_one_line() -> None:
    class Doubtful(Toy):
        def summary(self) -> Summary:
            return replace(super().summary(), problems=("one", "two", "three"))

    assert str(Doubtful()).splitlines()[2:] == ["  not to be used: one; two; three"]


def test_long_records_are_shown_by_their_totals() -> None:
    length = RunLength.constant(0.1, 400, weight_decay=0.01)
    assert str(length) == "run length 40 (damping 0.035; 400 steps of SGD)\n  momentum 0, weight decay 0.01"
    model, data = network()
    found = example_importance(GaussNewtonOperator(model, nn.CrossEntropyLoss(), data))
    assert str(found).startswith("importance of examples: up to ")
    assert "9 examples; C at most 1" in str(found)
    assert len(str(found).splitlines()) == 2


def test_a_problem_is_shown_by_its_model_loss_and_sizes() -> None:
    model, data = network()
    problem = Problem.of(model, nn.CrossEntropyLoss(), data, torch.arange(9.0))
    assert str(problem) == (
        "problem: Linear under CrossEntropyLoss (9 examples)\n"
        "  15 parameters of torch.float64 on cpu, weights from 0 to 8"
    )


def test_text_and_table_say_the_same() -> None:
    assert str(Toy()) == "a <b> 1 ± 0.1 (of 3)\n  2 products\n  not to be used: too few & too small"
    table = Toy()._repr_html_()
    assert "<th>a &lt;b&gt;</th><td>1 ± 0.1</td>" in table
    assert "too few &amp; too small" in table


@pytest.mark.parametrize("name", list(RESULTS))
def test_every_result_is_two_lines_with_its_cost_and_no_tensor(name: str) -> None:
    result = RESULTS[name]()
    assert isinstance(result, Shown)
    first, second = str(result).splitlines()
    assert name in first
    assert (
        f"{result.solution.num_matvecs if name == 'influence scores' else result.num_matvecs:,} product" in second
    )
    assert repr(result) == str(result)
    if name == "influence scores":
        assert "(negative: helps; nats per unit of weight)" in first
    if name == "self-influence":
        assert "(positive: the loss rises without the example; nats)" in first
    for text in (str(result), result._repr_html_()):
        assert "tensor(" not in text
    assert result._repr_html_().startswith("<table>")


def test_a_solution_says_its_residual_and_when_it_has_not_converged() -> None:
    solved = ConjugateGradient(rtol=1e-6).solve(operator() + identity, systems(2))
    assert f"residual {float(solved.residual.max()):.2g} at most (2 right-hand sides, 30 unknowns)" in str(solved)
    stopped = ConjugateGradient(rtol=1e-6, max_steps=2).solve(operator() + identity, systems(1)[:, 0])
    assert "not to be used: not converged" in str(stopped)
    assert "not converged" in stopped.plot(Figure().add_subplot()).get_title()


@pytest.mark.parametrize("kind", ["bars", "images", "texts"])
def test_influence_draws_the_most_helpful_and_the_most_harmful_points(kind: str) -> None:
    torch.manual_seed(0)
    images, labels = torch.randn(9, 1, 4, 4).double(), torch.arange(9) % 3
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()
    data = (images, labels)
    result = influence(model, nn.CrossEntropyLoss(), data, data, damping=1.0, points=[8, 3, 5, 1, 0])
    texts = [f"sentence {i}" for i in range(9)]
    settings = {"bars": {}, "images": {"train": data, "test": data}, "texts": {"train": texts, "test": texts}}
    figure = result.plot(2, tests=[6], **settings[kind])
    order = result.points[result.scores[6].argsort()].tolist()
    chosen = [*order[:2], *order[-2:]]
    if kind == "bars":
        (ax,) = figure.axes
        assert [int(label.get_text()) for label in ax.get_yticklabels()] == chosen
        assert [bar.get_width() for bar in ax.patches] == pytest.approx(
            [float(result.scores[6][result.points == point]) for point in chosen]
        )
    else:
        assert figure.axes[0].get_title() == "test example 6"
        assert [int(ax.get_title().split(":")[0]) for ax in figure.axes[1:]] == chosen
        if kind == "images":
            shown = torch.as_tensor(figure.axes[1].images[0].get_array().data)
            own = images[chosen[0], 0]
            torch.testing.assert_close(
                shown.double(), (own - own.min()) / (own.max() - own.min()), atol=1e-6, rtol=0
            )
        else:
            assert [ax.texts[0].get_text() for ax in figure.axes[1:]] == [f"sentence {p}" for p in chosen]
    refuses(r"tests must be numbers of test examples from 0 to 8, got \[9\]", result.plot, tests=[9])
    own = self_influence(model, nn.CrossEntropyLoss(), data, damping=1.0)
    figure = own.plot(2, **settings[kind])
    order = own.own.argsort(descending=True).tolist()
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()] if kind == "bars" else []
    drawn = labels or [ax.get_title().split(":")[0] for ax in figure.axes[1:]]
    assert drawn == [str(point) for point in (*order[:2], *order[-2:])]
    assert figure.axes[0].get_title(loc="left" if kind == "bars" else "center") == "self-influence"


def test_drawing_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    solved = ConjugateGradient().solve(operator() + identity, systems(1))
    refuses(r"curvlab\[lab\]", solved.plot, error=ImportError)


def test_a_solver_without_history_says_which_ones_keep_it() -> None:
    with pytest.raises(ValueError, match=r"takes no steps \(Direct\).*ConjugateGradient"):
        Direct().solve(operator() + identity, systems(1)).plot()
