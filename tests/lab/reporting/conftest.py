"""A made-up results tree: three targets, several presets, every verdict, hostile text."""

import json
import shutil
from dataclasses import replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from curvlab.lab.reporting import Claim, Criterion, Interval, exact, judge, out_of_reach, plots, save_claims
from curvlab.lab.reporting.claims import Change
from curvlab.lab.reporting.report import build_report

PAPERS = Path(__file__).parents[3] / "experiments" / "papers"
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
REST = replace(STEPS, id="steps-rest", statement="The rest vanishes.")
THEOREM = Claim(
    id="theorem",
    statement="The error is below the bound.",
    source="Theorem 1",
    paper_value=1,
    measure="largest error over bound",
    criterion=Criterion(at_most=1.0, exact=True),
    changed=(Change("2026-11-20", "bound <1> instead of 0.9"),),
)


COMMIT = {"commit": "0123456789abcdef0123456789abcdef01234567", "clean": True}
OTHER = {"commit": "fedcba9876543210fedcba9876543210fedcba98", "clean": False}
UNITS = [
    {"name": "lissa/scores", **COMMIT, "count": 30, "seconds": 12.0},
    {"name": "lissa/response", **COMMIT, "count": 11, "seconds": 7.5},
    {"name": "lissa/response", **OTHER, "count": 3, "seconds": 1.0},
]


@cache
def drawn() -> bytes:
    """Two rows of five panels, drawn once for all folders."""
    points = np.random.default_rng(0).normal(size=(40, 2))
    figure, axes = plots.figure(2, 5)
    for ax in axes.flat:
        ax.scatter(*points.T)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


def fill(folder: Path, claims: list, *, title: str = "LiSSA against PBRF", num_rows: int = 40, **run: Any) -> None:
    folder.mkdir(parents=True)
    points = np.random.default_rng(0).normal(size=(num_rows, 2))
    frame = pd.DataFrame({"training_point": range(num_rows), "lissa": points[:, 0], "pbrf": points[:, 1]})
    for column in range(8):
        frame[f"a_rather_long_column_name_{column}"] = points[:, 0] * 10.0**column
    frame.to_csv(folder / "table.csv", index=False)
    (folder / "figure.png").write_bytes(drawn())
    paper, item, preset = folder.parts[-3:]
    facts = {
        "target": f"{paper}-{item}",
        "key": f"{paper}/{item}",
        "title": title,
        "preset": preset,
        "command": 'make lissa-fig1 PRESET=laptop ARGS="model=resnet20 solver.damping=0.35 ' + "x" * 80 + '"',
        "assembled": COMMIT,
        "judged": COMMIT,
        "drawn": OTHER,
        "units": UNITS,
        "settings": [
            {"name": "test points", "ours": 500, "paper": 500},
            {"name": "training images", "ours": [4998, 500], "paper": 1281167},
        ],
        "device": "cpu",
        "num_threads": 2,
        "wall_seconds": 2712.4,
        "unit_seconds": 5212.0,
        "peak_memory_bytes": 1_503_238_553,
        "num_matvecs": 123456,
        "seeds": [0, 1, 2],
        "data": {"cifar10": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"},
        "config": {"data": {"name": "cifar10"}, "solver": {"num_steps": 150, "note": "y" * 120}},
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
    open_ = judge(REST, 0.1, Interval(0.05, 0.15, "t 95 %, 3 seeds", 3), if_not_reproduced="More seeds.")
    wrong = judge(THEOREM, 1.5, exact(1.5), if_not_reproduced="Counter-example: H = diag(1, -1).")
    far = out_of_reach(STEPS, "Needs ImageNet, which the embedded preset has not.")
    fill(root / "lissa/fig1/embedded", [half, far], units="commits not recorded")
    fill(root / "lissa/fig1/laptop", [good, bad])
    fill(root / "lissa/tab3/embedded", [good], title="")
    fill(root / "zeta/fig10/embedded", [good], title="<b>bold</b>")
    fill(root / "zeta/fig9/embedded", [good, open_, wrong])
    fill(root / "lissa/fig1/smoke", [bad], title="smoke must not be shown")
    fill(root / "lissa/fig1/laptop+model=mlp", [bad], title="a variation must not be shown")
    return root


@pytest.fixture
def results(_made_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(_made_once, tmp_path / "results"))


@pytest.fixture(scope="session")
def whole(_made_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results with their page, written once; no test changes them."""
    root = tmp_path_factory.mktemp("whole")
    results = Path(shutil.copytree(_made_once, root / "results"))
    (root / "papers").mkdir()
    shutil.copy(PAPERS / "lissa.csv", root / "papers" / "lissa.csv")
    (root / "papers" / "headlines.yaml").write_text(
        "lissa:\n"
        "  - {says: LiSSA gives the PBRF <in time>., claims: [lissa/fig1/exact-*, lissa/tab3/exact-correlates]}\n"
        "  - {says: Enough steps., claims: [lissa/fig1/steps-enough]}\n"
        "  - {says: Nobody looked yet., claims: [lissa/fig1/nothing]}\n"
        "pbrf:\n"
        "  - {says: Not a word of this., claims: [pbrf/tab5/gap]}\n"
    )
    build_report(results, papers=root / "papers")
    return results


@pytest.fixture(scope="session")
def first(whole: Path) -> str:
    return (whole / "index.html").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def page(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """All of it, in a single file."""
    path = tmp_path_factory.mktemp("single") / "page.html"
    return build_report(whole, papers=whole.parent / "papers", single_file=path).page.read_text(encoding="utf-8")
