"""Units of work of tab4 and tab5 against retraining and matrices written out; their figure, what they quote."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.influence.retraining import GAPS
from curvlab.lab import all_targets, load_config, load_paper_numbers, start, task_settings
from curvlab.lab.claims.claims import OUT_OF_REACH
from experiments import pbrf
from experiments.papers import FOLDER
from experiments.pbrf.gaps import SOLVER_BY_LISSA, draw
from experiments.pbrf.networks import load_network
from experiments.pbrf.responses import OWN_LENGTH, Decomposition, constant_loss, lissa_name
from tests.refusals import refuses

from .dense_mlp import dense_hessian, losses, weights

# --- Units of work on a network of tanh in double precision, against retraining and matrices written out
TASK = "mlp_4_diabetes_60"
SADDLE = {"hessian": {"_target_": "experiments.pbrf.solvers.BunchKaufman"}}


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Decomposition]]:
    """Return a function that makes a decomposition of two points, or of groups, with changed settings."""
    target, root = all_targets()["pbrf/tab4"], tmp_path_factory.mktemp("responses")
    folders = [f"results.root={root / 'results'}", f"store.root={root / 'store'}"]
    cfg = load_config(target, ["preset=smoke", "tracker=none", "progress=false", *folders])
    with start(cfg, key=target.key, title="") as run:

        def make(fraction: float | None = None, **changed: object) -> Decomposition:
            settings = task_settings(cfg)[TASK]
            settings.update(changed)
            return Decomposition(load_network(run, TASK, settings, 0), 2, fraction)

        yield make


def test_influence_is_that_of_the_dense_hessian_in_double_precision(at) -> None:
    points = at(dtype="float32", influence=SADDLE)
    network = points.network
    assert next(network.model.parameters()).dtype == torch.float32
    found, residual = points.influence("hessian")
    hessian, gradients = dense_hessian(network.model, network.train)
    l2 = network.settings.training.weight_decay
    shifted = hessian + (network.settings.damping + l2) * torch.eye(len(hessian), dtype=torch.float64)
    wanted = torch.linalg.solve(shifted, gradients[points.points].T).T / len(gradients)  # +1/N H⁻¹ ∇l, Eq. 19
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
    assert residual < 1e-10
    below = int((torch.linalg.eigvalsh(shifted) < 0).sum())
    assert below > 0  # a saddle: what the solver is for
    assert points.hessian_spectrum()["num_below"] == below


def test_lissa_is_the_recursion_on_the_dense_matrix(at) -> None:
    points = at()
    network = points.network
    hessian, gradients = dense_hessian(network.model, network.train)
    shifted = hessian + network.settings.damping * torch.eye(len(hessian), dtype=torch.float64)
    b = gradients[points.points].T / len(gradients)
    found, u = points.truncated("hessian"), torch.zeros_like(b)
    for _ in range(network.settings.lissa.num_steps):
        u = b / 25 + u - shifted @ u / 25
    theta = weights(network.model)
    of_test = torch.autograd.functional.jacobian(lambda vector: losses(vector, network.test), theta)
    assert_close(found[lissa_name(25)]["predicted"], of_test @ u, rtol=1e-6, atol=1e-9)
    assert found[lissa_name(25)]["solver"].shape == found[lissa_name(25)]["moved"].shape == (2, 2)
    # The PBRF's steps: K/2 epochs of two batches at a tenth of 0.1. So short a descent is that times the gradient.
    length = network.length("proximal_bregman")
    assert length == pytest.approx(5 * 2 * 0.01)
    values, vectors = torch.linalg.eigh(shifted)
    flow = vectors @ ((-torch.expm1(-length * values) / values)[:, None] * (vectors.T @ b))
    assert_close(found[OWN_LENGTH]["predicted"], of_test @ flow, rtol=1e-6, atol=1e-9)
    assert at(lissa=None).truncated("hessian") == {}


def test_sampled_lissa_is_near_that_of_the_whole_matrix(at) -> None:
    settings = {"num_steps": 40, "num_repeats": 2, "rtol": 1e-4, "max_steps": 60}
    whole, sampled = (at(lissa=settings | {"batch_size": size}).truncated("gauss_newton") for size in (None, 30))
    name = lissa_name(50)
    difference = (whole[name]["predicted"] - sampled[name]["predicted"]).norm()
    assert 0 < float(difference / whole[name]["predicted"].norm()) < 0.2


def test_groups_are_left_out_of_retraining(at) -> None:
    found = at(0.7)
    network = found.network
    inputs, targets = network.train
    moved = found.displacement("warm")
    start = [parameter.detach().clone() for parameter in network.model.parameters()]
    for group, own in zip(found.groups, moved, strict=True):
        with torch.no_grad():
            for parameter, value in zip(network.model.parameters(), start, strict=True):
                parameter.copy_(value)
        optimizer = torch.optim.SGD(network.model.parameters(), lr=network.lr)
        for epoch in network.batches[network.num_epochs :]:
            for batch in epoch:
                kept = batch[~torch.isin(batch, group)]
                optimizer.zero_grad()
                error = (network.model(inputs[kept]) - targets[kept].reshape(len(kept), -1)).square().sum()
                (error / len(batch)).backward()
                optimizer.step()
        end = weights(network.model) - torch.cat([value.flatten() for value in start])
        assert_close(own, end, rtol=1e-8, atol=1e-10)


def test_groups_are_random_fractions_and_nested(at) -> None:
    small, large = at(0.1).groups, at(0.7).groups
    assert [len(group) for group in small + large] == [6, 6, 42, 42]
    for inner, outer in zip(small, large, strict=True):
        assert set(inner.tolist()) < set(outer.tolist())
        assert len(set(outer.tolist())) == 42
    assert set(large[0].tolist()) != set(large[1].tolist())
    assert at(0.1).key != at(0.7).key != at(None).key


def test_cold_and_warm_optimum_are_computed_once_for_all_dampings(at) -> None:
    one, other = at(), at(damping=0.1)
    found, misses = [one.displacement(name) for name in ("cold", "warm")], one.network.run.store.misses
    for name, own in zip(("cold", "warm"), found, strict=True):
        assert torch.equal(own, other.displacement(name))
    assert one.network.run.store.misses == misses
    assert not torch.equal(one.displacement("proximal"), other.displacement("proximal"))


# ------------------------------------------------------------------ the best constant outputs, against L-BFGS
GENERATOR = torch.Generator().manual_seed(0)
CLASSES = torch.randint(3, (40,), generator=GENERATOR)
TOKENS = torch.where(
    torch.rand(8, 5, generator=GENERATOR) < 0.2, -100, torch.randint(3, (8, 5), generator=GENERATOR)
)
PIXELS = torch.rand(40, 6, generator=GENERATOR, dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss", "targets", "outputs"),
    [
        (nn.CrossEntropyLoss(), CLASSES, 3),
        (nn.CrossEntropyLoss(), TOKENS, 3),
        (nn.BCEWithLogitsLoss(), PIXELS, 6),
        (nn.BCEWithLogitsLoss(), (PIXELS[:, :1] > 0.3).double(), 1),
        (nn.MSELoss(), 3 * PIXELS[:, :2], 2),
    ],
)
def test_no_constant_does_better(loss: nn.Module, targets: Tensor, outputs: int) -> None:
    constant = torch.zeros(outputs, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([constant], max_iter=200, line_search_fn="strong_wolfe", tolerance_grad=1e-10)

    def closure() -> Tensor:
        optimizer.zero_grad()
        flat = targets.flatten() if isinstance(loss, nn.CrossEntropyLoss) else targets
        value = loss(constant.expand(len(flat), outputs), flat)
        value.backward()
        return value

    optimizer.step(closure)
    assert constant_loss(loss, targets) == pytest.approx(float(closure()), rel=1e-8)


def test_an_unknown_loss_is_refused() -> None:
    refuses("not known for L1Loss", constant_loss, nn.L1Loss(), PIXELS, error=TypeError)


# ------------------------------------------------------------------ the figure
def row(task: str, paper: float | None, stands_for: str = "", low: float = 1.5) -> dict[str, object]:
    sizes: dict[str, object] = {"task": task, "stands for": stands_for, "paper's row": task.upper()}
    sizes |= {"moved": 1.0, "moved by linearised": 1.0, "learned": True, "residual": 1e-3, "epochs": 9, "seeds": 3}
    for gap in GAPS:
        sizes |= {f"{gap} per_example mean": 2.0, f"{gap} per_example low": low, f"{gap} per_example high": 2.5}
        sizes |= {} if paper is None else {f"{gap} paper mean": paper, f"{gap} paper ±": 0.1}
    return sizes


NO_POINTS = pd.DataFrame(columns=["task", "seed", "point", "gap", "per_example"])


def points_of(task: str, **sizes: float) -> pd.DataFrame:
    """Return three seeds' gaps of one point, a hundredth more from seed to seed."""
    rows = [(task, seed, 0, gap, (1 + seed / 100) * size) for seed in range(3) for gap, size in sizes.items()]
    return pd.DataFrame(rows, columns=[*NO_POINTS])


def drawn(computed_of, *rows: dict[str, object]) -> dict[str, list[str]]:
    figures = draw(computed_of({"table": pd.DataFrame(rows), "points": NO_POINTS}))
    return {name: [ax.get_title() for ax in figure.axes] for name, figure in figures.items()}


def test_the_headline_picture_has_the_rows_that_decide_and_the_other_says_why_not(computed_of) -> None:
    rows = [row(name, 0.5) for name in "abcdf"]
    rows[0] |= {"learned": False, "train loss": 0.7, "constant loss": 0.6}
    rows[1]["residual"], rows[3]["epochs"] = 0.5, 3
    rows.insert(4, row("e", None, "LR Cancer") | {"seeds": 1})
    found = drawn(computed_of, *rows)
    assert found["figure.png"] == ["c\n(3 seeds)", "f\n(3 seeds)"]
    names = ["a\n(3 seeds, learned nothing)", "b\n(3 seeds, not solved)", "c\n(3 seeds)", "d\n(3 seeds)"]
    names += ["e\n(1 seed, for LR Cancer)", "f\n(3 seeds)"]
    assert found["figure_more.png"] == names


def test_the_figure_has_intervals_and_the_papers_values(computed_of) -> None:
    rows = [row("a", 0.5), row("b", 0.0), row("c", None)]
    figure = draw(computed_of({"table": pd.DataFrame(rows), "points": NO_POINTS}))["figure_more.png"]
    printed = [ax.collections[-1].get_offsets()[1:, 0].tolist() for ax in figure.axes[:2]]
    assert printed == [[0.5] * len(GAPS), [5e-4] * len(GAPS)]
    assert len(figure.axes[2].collections) == len(figure.axes[0].collections) - 1
    bars = figure.axes[0].collections[0].get_segments()[1:]
    assert [segment[:, 0].tolist() for segment in bars] == [[1.5, 2.5]] * len(GAPS)


def test_the_papers_solver_error_stands_beside_lissa_where_that_is_computed(computed_of) -> None:
    points = points_of("a", **{SOLVER_BY_LISSA: 0.3})
    table = pd.DataFrame([row("a", 0.5)])
    ax = draw(computed_of({"table": table, "points": points}))["figure.png"].axes[0]
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names[-2:] == ["solver error, exact", "solver error, LiSSA"]
    diamonds = ax.collections[-1].get_offsets()[:, 0]
    assert diamonds[-2:].tolist() == [None, 0.5]  # masked: none beside the exact solve


def test_the_papers_claim_and_its_solver_cell_are_judged_by_lissa(results_of) -> None:
    sizes = dict.fromkeys(GAPS, 1.0) | {"solver": 9.0, SOLVER_BY_LISSA: 0.1, "linearisation": 0.1}
    moves = {"moved": 9.0, "moved by PBRF": 1.0, "moved by linearised": 9.0, "moved by LiSSA": 8.0}
    own = row("m", 0.1) | {"epochs": 1000, "LiSSA beside": "LiSSA, σ = 10", "gradient norm": 0.1}
    own |= {"train loss": 0.1, "constant loss": 1.0, "residual": 1e-3, "moved by PBRF": 1.0}
    found = results_of("pbrf/tab5", {"table": pd.DataFrame([own]), "points": points_of("m", **sizes, **moves)})
    by_lissa, exact = found["answers-another-question"], found["exact-answers-another-question"]
    assert by_lissa.value == pytest.approx(0.2 / 3.2)
    assert exact.value == pytest.approx(9.1 / 12.1)
    assert not by_lissa.claim.source.startswith("ours")
    assert exact.claim.source.startswith("ours")
    assert found["cell-agrees-solver"].value == 0  # 0.1, as printed; the exact one is 9
    table, near = (
        pd.DataFrame([own | {"moved": 0.1}]),
        points_of("m", **sizes, **moves | {"moved by linearised": 0.1 / 1.01}),
    )
    found = results_of("pbrf/tab5", {"table": table, "points": near})
    assert found["cell-agrees-solver"].verdict == OUT_OF_REACH  # an influence of zero rounds to it, too
    unsolved = own | {"residual": 0.5}
    found = results_of(
        "pbrf/tab5", {"table": pd.DataFrame([unsolved]), "points": points_of("m", **sizes, **moves)}
    )
    assert found["answers-another-question"].value == pytest.approx(0.2 / 3.2)  # LiSSA, whatever its residual
    assert found["exact-answers-another-question"].value is None
    missing = own | {"LiSSA beside": None}  # of one seed not finite
    found = results_of("pbrf/tab5", {"table": pd.DataFrame([missing]), "points": points_of("m", **sizes, **moves)})
    assert found["answers-another-question"].explanation == "LiSSA is not finite in every seed."


# ------------------------------------------------------------------ what is quoted
PAPER = load_paper_numbers("pbrf", folder=FOLDER)


def quoted(item: str, claim: str) -> str:
    sheet = yaml.safe_load((Path(pbrf.__path__[0]) / f"{item}.yaml").read_text(encoding="utf-8"))
    return " ".join(str(sheet["claims"][claim]["paper_value"]).split())


def printed(table: str, row: str) -> dict[str, float]:
    return {gap: PAPER.get(table, row, gap).value for gap in GAPS}


NETWORKS = [row for row in dict.fromkeys(n.row for n in PAPER.in_table("Table 5")) if not row.startswith("LR ")]


def test_ranges_over_table_5_follow_from_its_rows() -> None:
    rows = [printed("Table 5", row) for row in NETWORKS]
    errors = [row["linearisation"] + row["solver"] for row in rows]
    shares = [error / sum(row.values()) for error, row in zip(errors, rows, strict=True)]
    text = f"{100 * min(shares):.2f} % to {100 * max(shares):.2f} % by Table 5's rows of neural networks"
    assert quoted("tab5", "answers-another-question") == text
    solver = [row["solver"] for row in rows]
    assert quoted("tab5", "solver-reaches-it").startswith(
        f"the solver error is {min(solver):.3f} to {max(solver):.3f},"
    )
    assert quoted("tab5", "influence-is-the-pbrf").startswith(f"{min(errors):.3f} to {max(errors):.3f},")
    zeros, thousandths = (sum(row["linearisation"] == size for row in rows) for size in (0.0, 0.001))
    largest = max(row["linearisation"] for row in rows)
    assert quoted("tab5", "linearisation-small").startswith(
        f"0.000 in {zeros} of {len(rows)} rows of neural networks, 0.001 in {thousandths}, "
        f"{largest:.3f} (Transformer);"
    )
    assert zeros + thousandths + 1 == len(rows)
    logistic = [printed("Table 5", f"LR {name}") for name in ("Cancer", "Diabetes")]
    assert not any(value for row in logistic for value in row.values())


def test_what_is_said_of_table_4_follows_from_it() -> None:
    solver = {
        name: [printed(table, f"MLP {name}")["solver"] for table in ("Table 5", "Table 4")]
        for name in ("Concrete", "MNIST", "FashionMNIST", "Energy")
    }
    said = ", ".join(f"{before:.3f} to {after:.3f} ({name})" for name, (before, after) in solver.items())
    assert quoted("tab4", "solver-error-grows") == said
    grown = {name: after / before for name, (before, after) in solver.items() if before}
    found = re.findall(r"([\d.]+) times \((\w+)\)", quoted("tab4", "grows-only-slightly"))
    assert {name: float(times) for times, name in found} == pytest.approx(grown, rel=0.02)
    shares = {}
    for name in solver:
        row = printed("Table 4", f"MLP {name}")
        shares[name] = row["solver"] / min(row[gap] for gap in ("warm_start", "proximity", "non_convergence"))
    assert shares.pop("Concrete") > 1
    assert max(shares.values()) == shares["MNIST"] == pytest.approx(0.5)
    assert "Concrete: solver 0.017, proximity 0.002; elsewhere at most 0.5" in quoted("tab4", "still-lower")
