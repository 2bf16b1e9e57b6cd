"""Passes that fit into memory: from a budget, and by halving when an allocator gives up."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.curvature import DataOperator, FisherOperator, GaussNewtonOperator, HessianOperator
from curvlab.curvature.examples import quadratic_forms
from curvlab.problem.memory import (
    Estimate,
    Memory,
    MemoryWarning,
    activation_bytes,
    free_memory,
    is_out_of_memory,
    with_halving,
)
from tests.curvature.curvature_oracles import Memory as Peak
from tests.models import CPU_ERROR, Limited
from tests.refusals import refuses

ERRORS = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError(CPU_ERROR), MemoryError()]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double().eval()


def data(count: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(2, (count,), generator=generator)


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", MemoryWarning)
        yield


def build(kind: type[DataOperator], model: nn.Module, **settings) -> DataOperator:
    if kind is FisherOperator:
        settings |= {"kind": "empirical"}
    return kind(model, nn.CrossEntropyLoss(), data(), **settings)


@pytest.mark.parametrize(
    ("kind", "error"),
    [(GaussNewtonOperator, error) for error in ERRORS]
    + [(HessianOperator, ERRORS[0]), (FisherOperator, ERRORS[0])],
)
def test_a_pass_is_halved_until_it_fits_and_stays_so(kind, error: Exception) -> None:
    model = Limited(*network(), most=12, error=error)
    op, expected = build(kind, model, batch_size=40), build(kind, network(), batch_size=40)
    vectors = op.randn(2, torch.Generator().manual_seed(0))
    with pytest.warns(MemoryWarning, match="memory ran out: a pass now takes 10 examples and 2 vectors"):
        product = op @ vectors
    assert_close(product, expected @ vectors, rtol=1e-12, atol=1e-14)
    model.seen.clear()
    with no_warning():
        assert_close(
            op @ vectors, product, rtol=0, atol=0
        )  # it has learnt, and nothing of the failed pass is left
        assert_close(op.sample(30, torch.Generator().manual_seed(2)) @ vectors[:, 0],
                     expected.sample(30, torch.Generator().manual_seed(2)) @ vectors[:, 0])  # fmt: skip
    assert max(model.seen) == 10


def test_other_errors_are_passed_on() -> None:
    op = build(
        GaussNewtonOperator, Limited(*network(), most=0, error=RuntimeError("shapes do not match")), batch_size=4
    )
    with pytest.raises(RuntimeError, match="shapes do not match"):
        op @ torch.ones(op.shape[0], dtype=torch.float64)
    assert not is_out_of_memory(ValueError("out of memory"))


def test_where_one_example_does_not_fit_the_error_says_what_is_left() -> None:
    op = build(GaussNewtonOperator, Limited(*network(), most=0, error=ERRORS[1]), batch_size=4)
    with pytest.warns(MemoryWarning), pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        op @ torch.ones(op.shape[0], dtype=torch.float64)
    assert "low_memory=True" in caught.value.__notes__[0]


def test_quadratic_forms_and_functions_of_a_size_are_halved_too() -> None:
    model = Limited(*network(), most=12, error=ERRORS[1])
    op = build(GaussNewtonOperator, model, batch_size=40)
    vectors = op.randn(3, torch.Generator().manual_seed(0))
    with pytest.warns(MemoryWarning):
        found = quadratic_forms(op, vectors)
    assert_close(found, op.inner(vectors, op @ vectors), rtol=1e-10, atol=1e-12)

    def rows(size: int) -> int:
        if size > 3:
            raise MemoryError
        return size

    with pytest.warns(MemoryWarning):
        assert with_halving(rows, 10) == 3
    with no_warning():
        assert with_halving(rows, 2) == 2


def test_vectors_are_halved_when_there_are_more_of_them() -> None:
    for columns, budget, expected in ((32, 20, (2, 4)), (1, 1e9, (8, 1)), (4, 1, (1, 1))):
        memory, estimate = Memory(budget=budget), Estimate(lambda n, k: n * (2 + k))
        with no_warning() if budget == 1e9 else pytest.warns(MemoryWarning, match="a pass takes"):
            memory.fit(estimate, examples=8, columns=columns, device=torch.device("cpu"))
        assert (memory.examples_at_once(8), min(memory.columns, columns)) == expected


def test_activations_of_one_example_are_what_the_layers_keep() -> None:
    """Two hidden layers of 8 in fp64 keep their inputs and their tanh: 3 + 8 + 8 numbers."""
    op = build(GaussNewtonOperator, network())
    found = activation_bytes(op.function, data()[0], fused=False, to_head=False)
    assert found == 8 * (3 + 8 + 8)


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("budget", [2**18, 2**20])
def test_a_product_holds_no_more_than_its_budget(budget: int, low_memory: bool) -> None:
    """Wide layers and 512 examples: 3.2 MB would be recorded."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]).eval()
    inputs = torch.randn(512, 64)
    targets = torch.randn(512, 64)
    settings = {"batch_size": 512, "low_memory": low_memory}
    op = GaussNewtonOperator(model, nn.MSELoss(), (inputs, targets), memory_budget=budget, **settings)
    whole = GaussNewtonOperator(model, nn.MSELoss(), (inputs, targets), **settings)
    vector = op.randn(1, torch.Generator().manual_seed(0))[:, 0]
    with pytest.warns(MemoryWarning, match="more than the .* MiB that are given: a pass takes"):
        product = op @ vector
    assert_close(product, whole @ vector, rtol=1e-4, atol=1e-7)
    # The product, a gradient, and what is summed of it; and the data, whose views count as a whole.
    beside = 3 * 4 * op.shape[0] + inputs.nbytes + targets.nbytes
    with Peak() as memory:
        op @ vector
    assert memory.peak < budget + beside
    with Peak() as memory:
        whole @ vector
    assert memory.peak > budget + beside


def test_defaults_are_left_alone_where_they_fit() -> None:
    """512 examples at a time, the very same numbers as with batch_size=512, and nothing is said."""
    with no_warning():
        by_default, given = (
            build(GaussNewtonOperator, network()),
            build(GaussNewtonOperator, network(), batch_size=512),
        )
        vector = by_default.randn(1, torch.Generator().manual_seed(0))[:, 0]
        assert torch.equal(by_default @ vector, given @ vector)


def test_what_is_free_is_known_and_a_share_of_it_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_memory(torch.device("cpu"))
    assert free is None or 2**20 < free < 2**50
    monkeypatch.setattr("curvlab.problem.memory.free_memory", lambda device: 10_000)
    op = build(GaussNewtonOperator, network())
    with pytest.warns(MemoryWarning, match="that may be used: a pass takes 10 examples and 1 vectors"):
        op @ torch.ones(op.shape[0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        (
            "0::/job/step",
            {"job/memory.max": "9000", "job/memory.current": "2500", "job/memory.stat": "inactive_file 500"},
        ),
        (
            "0::/outside",
            {"memory.max": "90000", "memory.current": "83000"},
        ),  # a container sees its own group as the root; its limit, not what is left, is above the machine's
        (
            "3:cpu:/x\n4:memory:/job",
            {
                "memory/job/memory.limit_in_bytes": "9000",
                "memory/job/memory.usage_in_bytes": "2500",
                "memory/job/memory.stat": "cache 7\ntotal_inactive_file 500",
            },
        ),
    ],
)
def test_control_groups_leave_less_than_the_machine_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cgroup: str, files: dict[str, str]
) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable: 50 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text(cgroup)
    monkeypatch.setattr("curvlab.problem.memory._PROC", tmp_path / "proc")
    monkeypatch.setattr("curvlab.problem.memory._CGROUPS", tmp_path / "groups")
    cpu = torch.device("cpu")
    assert free_memory(cpu) == 50 * 1024
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    assert free_memory(cpu) == 7000
    for unlimited in ("max", str(2**63 - 4096)):
        for name in files:
            if name.endswith(("max", "limit_in_bytes")):
                (tmp_path / "groups" / name).write_text(unlimited)
        assert free_memory(cpu) == 50 * 1024


@pytest.mark.parametrize(
    "job", [{"MEM_PER_NODE": "300"}, {"MEM_PER_CPU": "100", "CPUS_ON_NODE": "3"}, {"MEM_PER_NODE": "0"}], ids=str
)
def test_what_slurm_gives_a_job_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job: dict[str, str]
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemAvailable: 900000 kB\n")
    (tmp_path / "self" / "statm").write_text("99999 512 7 7 0 7 0")
    monkeypatch.setattr("curvlab.problem.memory._PROC", tmp_path)
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    limited = 300 * 2**20 - 512 * os.sysconf("SC_PAGE_SIZE")
    assert free_memory(torch.device("cpu")) == (900_000 * 1024 if job == {"MEM_PER_NODE": "0"} else limited)


def test_the_limit_of_the_address_space_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr("resource.getrlimit", lambda kind: (used + 2**24, -1))
    assert 0 < free_memory(torch.device("cpu")) <= 2**24 + 2**22


def test_a_budget_is_in_bytes() -> None:
    refuses("memory_budget is in bytes", build, GaussNewtonOperator, network(), memory_budget=0.5)
