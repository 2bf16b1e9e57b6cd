"""A made-up results tree: three targets, several presets, every verdict, hostile text."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from curvlab.reporting import Claim, Criterion, Interval, judge, out_of_reach, plots, save_claims

CORRELATES = Claim(
    id="exact-correlates",
    statement="Influence by CG and the exact PBRF lie on the line x = y.",
    source="Klochkov & Liu 2024, Sec. 4, Fig. 1",
    paper_value="points along x = y",
    measure="median over training points of the Pearson correlation over test points",
    criterion=Criterion(at_least=0.99, direction_at_least=0.5),
)
STEPS = Claim(
    id="steps-enough",
    statement="The recommended number of steps suffices <script>alert('x')</script> & more.",
    source="Table 1",
    paper_value=150,
    measure="relative error at the last step",
    criterion=Criterion(at_most=0.1),
)


def fill(
    folder: Path, claims: list, *, title: str = "LiSSA against PBRF", num_rows: int = 40, **run: object
) -> None:
    folder.mkdir(parents=True)
    points = np.random.default_rng(0).normal(size=(num_rows, 2))
    frame = pd.DataFrame({"training_point": range(num_rows), "lissa": points[:, 0], "pbrf": points[:, 1]})
    for column in range(8):
        frame[f"a_rather_long_column_name_{column}"] = points[:, 0] * 10.0**column
    frame.to_csv(folder / "table.csv", index=False)
    figure, axes = plots.figure(2, 5)
    for ax in axes.flat:
        ax.scatter(*points.T)
        plots.identity_line(ax)
        plots.annotate(ax, "r = 0.98")
    figure.savefig(folder / "figure.png")
    facts = {
        "title": title,
        "command": 'make lissa-fig1 PRESET=laptop ARGS="model=resnet20 solver.damping=0.35 ' + "x" * 80 + '"',
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "clean": True,
        "device": "cpu",
        "num_threads": 2,
        "wall_seconds": 2712.4,
        "unit_seconds": 5212.0,
        "peak_memory_bytes": 1_503_238_553,
        "num_matvecs": 123456,
        "seeds": [0, 1, 2],
        "data": {"cifar10": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"},
        "config": {"data": {"name": "cifar10"}, "solver": {"num_steps": 150, "note": "y" * 120}},
        "scale": {"test points": {"ours": 500, "paper": 500}, "training images": [4998, 1281167]},
        "reduced": ["ResNet-20 instead of ResNet-18", "CIFAR-10 instead of ImageNet"],
    }
    (folder / "run.json").write_text(json.dumps(facts | run))
    save_claims(folder, claims)


@pytest.fixture(scope="session")
def _made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made_once") / "results"
    good = judge(CORRELATES, 0.998, Interval(0.995, 0.999, "bootstrap 95 %, 25 points", 25), if_not_reproduced="-")
    half = judge(
        CORRELATES,
        0.9,
        Interval(0.8, 0.95, "t 95 %, 3 seeds", 3),
        if_not_reproduced="See fig1/laptop: batch noise.",
    )
    bad = judge(STEPS, 0.7, Interval(0.5, float("inf"), "t 95 %, 3 seeds", 3), if_not_reproduced="It diverges.")
    far = out_of_reach(STEPS, "Needs ImageNet, which the embedded preset has not.")
    fill(root / "lissa/fig1/embedded", [half, far], clean=False)
    fill(root / "lissa/fig1/laptop", [good, bad])
    fill(root / "lissa/tab3/embedded", [good], title="")
    fill(root / "zeta/fig10/embedded", [good], title="<b>bold</b>")
    fill(root / "zeta/fig9/embedded", [good])
    fill(root / "lissa/fig1/smoke", [bad], title="smoke must not be shown")
    fill(root / "lissa/fig1/laptop+model=mlp", [bad], title="a variation must not be shown")
    return root


@pytest.fixture
def results(_made_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(_made_once, tmp_path / "results"))
