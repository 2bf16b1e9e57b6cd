"""Several processes against one, and how they end: each check of forked_checks.py is a test here; ranks alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from curvlab.curvature import GaussNewtonOperator
from curvlab.parallel import DataParallelOperator, Ranks, joined, launched
from tests.models import Examples
from tests.refusals import refuses
from tests.warm import Warm

ROOT = Path(__file__).parents[2]
ON_TWO = [
    "products", "solvers", "influence", "chains", "refusals", "importance", "estimated importance", "rows",
    "Kronecker factors", "refusals of examples", "sharded products", "sharded, float32 inside", "sharded solvers",
    "sharded influence", "sharded refusals", "sharded memory",
]  # fmt: skip
ON_FOUR = ["products", "influence", "chains", "sharded"]
# Half a minute of CPU time for all, in the first test that asks how they ended: a busy machine takes longer.
pytestmark = pytest.mark.timeout(900)
KILLED, GOES_ON = "a rank is killed", "the solve goes on, and a rank fails"


@pytest.fixture(scope="module")
def ended(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], dict[str, Any]]:
    """How each check ended, by number of ranks and name: one process is started, which forks the others."""
    pytest.importorskip("transformers")
    found = warm.run(
        "-m", "tests.parallel.forked_checks", tmp_path_factory.mktemp("ranks"),
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    return {(int(line["ranks"]), line["name"]): line for line in lines}


def test_every_check_is_a_test(ended: dict[tuple[int, str], dict[str, Any]]) -> None:
    known = [(2, name) for name in [*ON_TWO, KILLED]] + [(4, name) for name in [*ON_FOUR, GOES_ON]]
    assert sorted(ended) == sorted(known)


@pytest.mark.parametrize(("ranks", "name"), [*((2, name) for name in ON_TWO), *((4, name) for name in ON_FOUR)])
def test_several_processes_compute_what_one_does(ended, ranks: int, name: str) -> None:
    result = ended[ranks, name]
    assert result["statuses"] == [0] * ranks, result["text"]


def test_processes_end_with_one_that_is_killed_and_others_go_on(ended) -> None:
    # Killed in the middle of a solve, while the other waits for it: both end, far sooner than the 60 s after which
    # waiting itself would fail.
    killed = ended[2, KILLED]
    assert killed["statuses"][1] == -9, killed["text"]
    assert killed["statuses"][0] == 1, killed["text"]
    assert "the solve went on" not in killed["text"]
    assert killed["seconds"] < 30

    # Four go on with the solve that two had begun. Then one raises an error: all end, and name it.
    fails = ended[4, GOES_ON]
    assert "the solve went on" in fails["text"], fails["text"]
    assert fails["statuses"] == [1] * 4
    assert "rank 3 of 4: ValueError: the last rank has had enough; all ranks end." in fails["text"]
    assert "rank 0 ends because of rank 3 of 4: ValueError: the last rank has had enough" in fails["text"]
    assert fails["seconds"] < 30


# --- Ranks and operators of a single process; what several do stands in launched_checks.py
def test_shares_lie_one_behind_the_other_and_differ_by_one_at_most() -> None:
    inputs, targets = torch.arange(11.0)[:, None], torch.arange(11)
    batches = [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])]
    for data in ((inputs, targets), TensorDataset(inputs, targets), ({"x": inputs}, targets)):
        shares = [Ranks(rank, 3).share(data) for rank in range(3)]
        assert torch.equal(torch.cat([share[1] for share in shares]), targets)
        assert sorted(len(share[1]) for share in shares) == [3, 4, 4]
    examples = Examples([(inputs[i], targets[i]) for i in range(11)])
    assert [len(Ranks(rank, 3).share(examples)) for rank in range(3)] == [3, 4, 4]
    assert [len(Ranks(rank, 2).share(batches)) for rank in range(2)] == [1, 1]


def test_data_that_cannot_be_shared_is_refused() -> None:
    pair = torch.zeros(3, 1), torch.zeros(3).long()
    refuses("3 examples or batches cannot be shared by 4 ranks: start fewer", Ranks(0, 4).share, pair)
    with pytest.raises(TypeError, match="give every rank a loader of its own examples, or pass the data set"):
        Ranks(0, 2).share(DataLoader(TensorDataset(*pair)))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_process_alone_needs_no_launcher(reduction: str) -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(3, 2).double().eval()
    data = torch.randn(7, 3, generator=generator, dtype=torch.float64), torch.arange(7) % 2
    whole = GaussNewtonOperator(model, nn.CrossEntropyLoss(reduction=reduction), data)
    assert not launched()
    with joined() as ranks:
        assert ranks == Ranks(0, 1)
        spread = DataParallelOperator(whole, ranks)
    vectors = whole.randn(2, generator)
    assert_close(spread @ vectors, whole @ vectors)
    assert spread.is_psd
    assert spread.num_examples == 7
    samples = [op.sample(3, torch.Generator().manual_seed(1)) @ vectors for op in (whole, spread)]
    assert_close(*samples)
    refuses("batch_size must be at least 1", spread.sample, 0)


def test_the_mean_is_over_predictions_of_all_ranks() -> None:
    # Two ranks in one process: the sum of what each adds is the matrix of all examples.
    class Pretended(Ranks):
        def agree(self, numbers, what) -> None:
            pass

        def gather(self, value):
            assert value == [2, 5][self.rank]
            return [2, 5]

        def sum(self, tensor):
            return tensor

    generator = torch.Generator().manual_seed(0)
    model, loss = nn.Linear(3, 2).double().eval(), nn.CrossEntropyLoss()
    data = torch.randn(7, 3, generator=generator, dtype=torch.float64), torch.arange(7) % 2
    vector = torch.randn(8, generator=generator, dtype=torch.float64)
    parts = [
        DataParallelOperator(GaussNewtonOperator(model, loss, (data[0][rows], data[1][rows])), Pretended(rank, 2))
        for rank, rows in enumerate((slice(0, 2), slice(2, 7)))
    ]
    assert [part.num_examples for part in parts] == [7, 7]
    assert_close(parts[0] @ vector + parts[1] @ vector, GaussNewtonOperator(model, loss, data) @ vector)
    samples = [part.sample(4, torch.Generator().manual_seed(3)) @ vector for part in parts]
    whole = GaussNewtonOperator(model, loss, data).sample(4, torch.Generator().manual_seed(3))
    assert_close(samples[0] + samples[1], whole @ vector)
