"""A dry run: sizes from closed forms, published times, stored units, and nothing computed or written."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from curvlab.lab import all_targets, load_config
from curvlab.lab.targets.plan import in_bytes, plan, sizes, stored_units
from curvlab.lab.targets.target import ROOT

MLP = {
    "data": {"_target_": "curvlab.lab.data.load_mnist", "num_train": 500},
    "model": {"_target_": "curvlab.lab.models.MLP", "hidden_sizes": [64], "activation": "tanh"},
}


def test_sizes_of_an_mlp_have_a_closed_form() -> None:
    weights = 784 * 64 + 64 * 10
    total = weights + 74
    found = sizes(MLP | {"freeze": {"normalization": False, "biases": True}})
    assert found.startswith(f"{weights:,} parameters and 74 frozen, {in_bytes(4 * total)}; ")
    assert f"holds {in_bytes(4 * (total + 3 * weights))} and" in found
    assert found.endswith(": one GPU of 80 GB")


def test_published_language_models_are_known_without_loading_them() -> None:
    cfg = load_config(all_targets()["lissa/tab1"], ["preset=paper"])
    lines = dict(line.split(": ", 1) for line in plan(all_targets()["lissa/tab1"], cfg))
    found = {name: lines[name].partition(" ")[0] for name in lines if name.endswith("openwebtext2")}
    assert found == {
        "opt_1b_openwebtext2": "1,315,758,080",
        "llama_7b_openwebtext2": "6,738,415,616",
        "mistral_7b_openwebtext2": "7,241,732,096",
    }
    assert lines["llama_7b_openwebtext2"].endswith("2 GPUs of 80 GB")
    assert "CPU time" in lines["published, laptop"]


def test_encoder_decoders_have_a_plan() -> None:
    settings = {"data": {}, "source_length": 24, "target_length": 20, "tokenizer": {"vocabulary_size": 512}}
    t5 = {"_target_": "curvlab.lab.models.small_t5", "num_layers": 1, "width": 32, "num_heads": 2}
    tied, each_way = 512 * 32, 2 * 32 * 128 + 32 * 2  # embeddings; feed-forward and relative positions
    attention, norms = 3 * 4 * 32 * 32, (2 + 3 + 2) * 32
    assert sizes(settings | {"model": t5, "freeze": {}}).startswith(
        f"{tied + 2 * each_way + attention + norms:,} p"
    )
    assert sizes(settings | {"model": {"name": "google-t5/t5-small"}, "freeze": {}}).startswith("60,506,624 p")


def test_what_cannot_be_known_says_why() -> None:
    assert "names no data and model" in sizes({"model": None})
    assert "cannot be built" in sizes(MLP | {"data": {"_target_": "curvlab.lab.data.no_such_loader"}})
    hub = {"model": {"name": "somebody/model"}, "tokenizer": {"pretrained": "somebody/model"}, "data": {}}
    assert "somebody/model are not known without loading it" in sizes(hub)
    assert in_bytes(1.3157e12) == "1.32 TB"


def test_on_the_command_line_it_computes_nothing(tmp_path: Path) -> None:
    # In a process of its own: Hydra's logging closes what pytest captures.
    folders = [f"results.root={tmp_path / 'results'}", f"store.root={tmp_path / 'store'}"]
    words = ["run", "ngd-fig1", "preset=laptop", "~tasks.ffnn_1_layer_mnist_10000", "plan=true", *folders]
    command = shlex.join([sys.executable, "-m", "experiments", *words, f"hydra.run.dir={tmp_path}"])
    head = f"set -o pipefail; {command} | head -n 2"  # which reads no further
    done = subprocess.run(["bash", "-c", head], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.startswith(
        "ngd-fig1 (laptop): a plan; nothing is computed\nffnn_2_layers_mnist_10000: 26,506"
    )
    assert done.stderr == ""
    assert not (tmp_path / "results").exists()
    assert not (tmp_path / "store").exists()


def stored(root: Path, *overrides: str) -> list[str]:
    folders = [f"results.root={root / 'nowhere'}", f"store.root={root / 'store'}"]
    target = all_targets()["rank1/prop"]
    return list(stored_units(target, load_config(target, ["preset=smoke", *folders, *overrides])))


def test_stored_units_are_found_until_one_is_not_there(smoke_result: Callable[..., Path], tmp_path: Path) -> None:
    store = smoke_result("rank1/prop").parents[3] / "store" / "rank1"
    root = shutil.copytree(store, tmp_path / "store" / "rank1").parents[1]
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    (line,) = stored(root)
    assert line.endswith(" units, all there are")
    (line,) = stored(root, "seed=1")
    assert line.startswith("store: 0 units; first that is not there: rank1/")
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    assert stored(root, "force=true") == stored(root / "nowhere") == []
