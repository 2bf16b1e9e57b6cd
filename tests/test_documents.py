"""What README, docs and docstrings say in Python runs as it stands, and their numbers are results'."""

import ast
import doctest
import importlib
import inspect
import json
import re
import runpy
import time
import tomllib
from pathlib import Path

import pandas as pd
import pytest
import yaml

# --- What README and docs say in Python runs as it stands, block after block, with the numbers that they assert
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["README.md", "docs/library.md", "docs/howto.md"])
def test_the_blocks_of_a_document_run(name: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    (tmp_path / "blocks.py").write_text("\n".join(blocks))
    start = time.process_time()
    found = runpy.run_path(str(tmp_path / "blocks.py"))
    if name == "README.md":
        assert time.process_time() - start < 30
        assert "It takes under half a minute" in (ROOT / name).read_text(encoding="utf-8")
        assert sum(map(bool, blocks[0].splitlines())) <= 15
    if name == "docs/howto.md":
        assert found["result"].scores.shape == (100, 300)
        return
    assert 10 < found["llc"].value < 40
    assert 0.3 < float(found["largest"].values[0]) < 0.7


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
)
def test_the_links_of_a_document_lead_somewhere(name: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text(encoding="utf-8")):
        assert link.startswith("http") or ((ROOT / name).parent / link).exists(), link


def test_the_readme_is_short_and_begins_with_its_picture() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 200
    assert sum(any(map(str.isalnum, word)) for word in readme.split()) <= 1500  # words, not the bars of tables
    assert "![" in "".join(readme.splitlines()[:25])


def test_the_networks_are_as_small_as_the_limitations_say() -> None:
    folder = ROOT / "results" / "benchmarks" / "attribution" / "laptop"
    assert round(pd.read_csv(folder / "retraining.csv").parameters.max() / 1e6) == 2
    text = (ROOT / "docs" / "limitations.md").read_text(encoding="utf-8")
    assert "networks of up to two million weights" in text
    scale = pd.read_csv(ROOT / "results" / "benchmarks" / "scale" / "laptop" / "scale.csv")
    assert f"measured up to {scale.parameters.max() / 1e6:.0f} million" in text


def test_the_table_of_sizes_is_what_its_script_prints() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "scale.py"))
    text = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert script["table"]() in text
    # The sizes that transformers builds on the meta device, and 4 bytes for each number.
    assert script["opt_parameters"](**script["OPT"]) == 1_315_758_080
    assert script["llama_parameters"](**script["LLAMA"]) == 6_738_415_616
    assert "| 5.3 GB | 27.0 GB |" in text
    # How far the forecast was off, and what fifty thousand examples and a hundred queries would take.
    scale = pd.read_csv(ROOT / "results" / "benchmarks" / "scale" / "embedded" / "scale.csv").set_index("method")
    cg = scale.loc["influence, block CG"]
    assert 1 / 8 < cg.forecast_seconds / cg.product_seconds / cg.products - 1 < 1 / 5
    assert cg.seconds / cg.products / cg.product_seconds > 2
    assert cg.hours > 48
    assert "(to a fifth on an MLP of ten million parameters); seconds were two to five times" in " ".join(
        text.split()
    )
    # On larger networks EK-FAC does not help, and seconds end influence.
    larger = pd.read_csv(ROOT / "results" / "benchmarks" / "scale" / "laptop" / "scale.csv")
    larger = larger.assign(task=larger.task.str[:3]).set_index(["task", "method"])
    plain, with_ekfac = (larger.xs(f"influence, block CG{end}", level="method") for end in ("", " with EK-FAC"))
    assert with_ekfac.products["mlp"] == 2 * plain.products["mlp"]
    assert with_ekfac.steps["res"] == plain.steps["res"]
    assert 8 < with_ekfac.residual["res"] / plain.residual["res"] < 12
    for of in (plain, with_ekfac):
        assert (of.seconds / of.products / of.product_seconds).between(2, 5).all()
    assert plain.steps["opt"] == 8
    assert plain.residual["opt"] > 1
    day = 24
    assert 2 * day < plain.hours["mlp"] < 7 * day
    assert 14 * day < plain.hours["res"] < 365 * day < plain.hours["opt"]
    assert 7 * day < larger.hours["res", "influence, all rows"] < 8 * day
    assert larger.hours["mlp", "influence, all rows"] < day
    told = "days of a core on the MLP, weeks on the `ResNet-18`, and more than a year on the OPT, there for the"
    assert told in " ".join(text.split())
    # No way of a product pays on every network.
    ways = pd.read_csv(ROOT / "results" / "benchmarks" / "speed" / "embedded" / "product_ways.csv")
    ways = ways.set_index(["way", "model"])
    assert (ways.to_default_low["two passes"] > 1).all()
    last = ways.loc["forward mode, channels last"]
    assert 0.9 < last.to_default["convnet"] < last.to_default_high["convnet"] < 1
    assert last.to_default_low["resnet18"] > 4 / 3
    typed = re.sub(r"(?m)^\|.*$", "", text.replace(script["table"](), ""))
    opt = yaml.safe_load((ROOT / "conf" / "task" / "opt_3_128_ptb.yaml").read_text(encoding="utf-8"))
    vocabulary, millions = opt["tokenizer"]["vocabulary_size"], larger.parameters.max() / 1e6
    told = (
        f"vocabulary of {vocabulary:,} tokens learned from the Penn Treebank, which leaves {millions:.0f} million"
    )
    assert told in " ".join(text.split())
    typed = " ".join(typed.split()).replace(told, "")
    assert re.findall(r"\b\d[\d.,e]*\b", re.sub(r"FSDP2|O\(size³\)", "", without_code(typed))) == []


def test_what_an_exact_solve_is_worth_is_as_in_the_table_of_residuals() -> None:
    text = " ".join((ROOT / "docs" / "enter.md").read_text(encoding="utf-8").split())
    found = pd.read_csv(ROOT / "results" / "benchmarks" / "board" / "embedded" / "residuals.csv")
    lds = found[found.against == "standard"].set_index("residual").lds
    assert f"from {lds[0.3]:.3f} to {lds[0.1]:.3f} where the residual falls from 0.3 to 0.1" in text
    assert f"to {lds[1e-4]:.3f} at 0.0001" in text


def test_versions_and_counts_in_the_docs_are_those_of_the_configs() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    concepts = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    for peer in ("pydvl", "dattri", "kronfluence"):
        (version,) = (line.partition("==")[2] for line in extras["peers"] if line.startswith(f"{peer}=="))
        assert f"| {peer} {version} |" in concepts.replace("pyDVL", "pydvl")
    board = yaml.safe_load((ROOT / "conf" / "benchmarks" / "board.yaml").read_text(encoding="utf-8"))
    enter = (ROOT / "docs" / "enter.md").read_text(encoding="utf-8")
    words = {3: "three", 4: "four", 10: "ten"}
    larger = yaml.safe_load((ROOT / "conf/benchmarks/board/laptop.yaml").read_text(encoding="utf-8"))["tasks"]
    (few,) = {task["num_standard"] for task in larger.values() if "num_standard" in task}
    assert f"mean of {words[board['num_standard']]} (`cifar10`, `ptb`, `ptb-gpt2`: of {words[few]}) |" in enter
    assert f"({board['num_networks']}, queries, examples)" in enter
    assert f"each of the {words[board['num_networks']]}," in enter


@pytest.mark.parametrize("name", ["library.md", "limitations.md"])
def test_what_the_chosen_localization_leaves_of_a_coefficient_is_the_benchmark_s(name: str) -> None:
    table = pd.read_csv(ROOT / "results" / "benchmarks" / "llc" / "laptop" / "exact.csv")
    shares = table[~table.sampler.str.contains("at the start")].exact_to_asymptote
    assert len(shares) == 9
    text = " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())
    assert f"{shares.min():.2f} to {shares.max():.2f} of the asymptotic" in text


def test_what_is_said_of_absent_rows_of_the_board_is_in_its_tables() -> None:
    text = " ".join((ROOT / "docs" / "enter.md").read_text(encoding="utf-8").split())
    results = ROOT / "results" / "benchmarks"
    table = pd.read_csv(results / "board" / "laptop" / "table.csv.bz2")
    (status,) = table[table.method == "TRAK, no projection"].status.unique()
    assert f'ends "{status}"' in text
    best = pd.read_csv(results / "board" / "embedded" / "best.csv.bz2")
    assert (best[best.method == "TRAK, no projection"].edge == "lowest").all()
    cost = pd.read_csv(results / "board" / "laptop" / "cost.csv")
    least = cost[cost.method.str.startswith("bergson CG")]["trainings of one damping"].min()
    assert f"at least {10 * int(least // 10)} trainings" in text


# The numbers that are typed: definitions, settings of other libraries, what other tests hold.
TYPED = {
    "README.md": "88",
    "CONTRIBUTING.md": "450 64 2",
    "running.md": "2e-3 5 1",
    "CHANGELOG.md": "5 5 1 5 5 700 1 2",
    "howto.md": "0",
    "enter.md": "0.1 0.715 0.734 0.3 0.1 0.742 0.0001 1 95 3 1 0 95 1 6 20",
    "library.md": "0.76 0.95 100 2 3",
    "limitations.md": "88 0.76 0.95",
    "concepts.md": "1 3.0.1 0.10.0 0.3.0 1.0.1 0.1 0.3.2 1 2.5.1 0.1 0.9.0 1e-6 1e-3 0.1.0 1 1 1 2 1 2 1 1 2 1",
    "hugging_face.ipynb": "1",
    "rank1.ipynb": "1 1 1 1",
    "ginger.ipynb": "1 1",
    "lissa.ipynb": "1 2 100",
}


def without_code(text: str) -> str:
    """Return a text without what stands in backticks, but for what is only a number there."""
    return re.sub(r"`([^`]*)`", lambda code: code[1] if re.fullmatch(r"-?\d[\d.,]*", code[1]) else "", text)


def prose_of(path: Path) -> str:
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


@pytest.mark.parametrize(
    "path",
    [path for pattern in ("*.md", "docs/*.md", "notebooks/*.ipynb") for path in sorted(ROOT.glob(pattern))],
    ids=lambda path: path.name,
)
def test_numbers_of_documents_are_generated_or_listed_here(path: Path) -> None:
    prose = re.sub(r"```.*?```|<!-- (\w+): .*?<!-- \1 end -->", "", prose_of(path), flags=re.DOTALL)
    if path.name == "scale.md":  # held by a test of its own
        return
    names = r"!?\[[^]]*\]\([^)]*\)|[Ee]qs?\. \d+( and \d+)?|\b20\d\d\b|arXiv [\d.]+|3\.11 to 3\.13|W&B"
    numbers = re.findall(r"\d+(?:[.,]\d+)*(?:e-?\d+)?", re.sub(rf"(?m)^\d\. |{names}", "", without_code(prose)))
    assert " ".join(numbers) == TYPED.get(path.name, "")


# --- A result of ours is typed nowhere: not in the docstrings that the site shows, not in what is said of claims
# nor in the docstrings of targets. With a point, 1e-5, or before what is measured; in what is said of claims every
# whole number of two digits, too.
COUNTED = "%|(?:times|per cent|products|passes|seconds|minutes|hours|GB|MB|MiB|points)\\b"
FRACTION = rf"(?<![\w.])\d[\d,]*(?:\.\d+|(?:\.\d+)?e-?\d+|(?= ?(?:(?:to|or) \d+ ?)?(?:{COUNTED})))"
WHOLE = r"(?<![\w.\-^])(?!20[012]\d\b)\d[\d,]*\d(?![\w.])"
PLACES = re.compile(
    r"(?s)>>> .*?(?=\n\s*\n|\Z)|`[^`]*`|::\n\n.*?\n\n(?=\S)|95 %"
    r"|\b(Eqs?|Sec|Tables?|Fig|App|Algorithms?)\.? \(?\w[\d.]*( (and|to) [\d.]+)*"
)
MEASURED = re.compile(r"\b(Measured on|in a trial|seconds on)\b")
# Definitions, thresholds, tolerances, arithmetic, costs by count, settings of other libraries.
DEFINED = {
    "linalg": "0.1",
    "problem": "1e-8 80",
    "curvature": "1e-3 1e-6 5",
    "spectrum": "32 80 80 32 1.5",
    "solvers": "0.01 1.01 1.01 18 36 1.6 1.01 20 3 5 5",
    "influence": "0.9 0.5 1e-7 1e-8 1e-16 1e-3 1e-2 1e-8 1e-8 10",
    "optim": "0.01 0.1 1e-6 1e-5 1e-7 1e-7 7 1e-5 0.18",
    "sampling": "1.01 5 0.25 0.1 0.1 0.01 1.3 12 5 1 1",
}


@pytest.mark.parametrize(
    "package", re.findall(r'(?m)^    "(\w+)",$', (ROOT / "docs" / "conf.py").read_text("utf-8"))
)
def test_docstrings_of_the_site_hold_no_measured_number(package: str) -> None:
    module = importlib.import_module(f"curvlab.{package}")
    shown = {f"curvlab.{package}": module.__doc__}
    for name in module.__all__:
        own = getattr(module, name)
        if inspect.isclass(own):
            shown |= {f"{name}.{key}": each.__doc__ for key, each in vars(own).items() if not key.startswith("_")}
        if callable(own):
            shown[name] = own.__doc__
    found = []
    for text in dict.fromkeys(str(each) for each in shown.values()):
        prose = PLACES.sub("", text)
        found += re.findall(FRACTION, prose)
        sentences = [each for each in re.split(r"[.;:]\s", prose) if MEASURED.search(each)]
        assert [each for each in sentences if re.search(r"\b\d", each)] == [], "take it to a table of results"
    assert " ".join(found) == DEFINED.get(package, "")


# Of modules' docstrings and claims' texts: equations at one point, printed numbers, settings, versions, sizes,
# thresholds, words of figures; of claims' histories former thresholds and settings.
SAID = {
    "benchmarks/attribution/__init__.py": "0.3",
    "benchmarks/attribution/which_score.py": "1 5",
    "benchmarks/board/__init__.py": "2505.24261 0.3",
    "benchmarks/board/more_scores.py": "50",
    "benchmarks/llc/__init__.py": "1.3",
    "benchmarks/llc/claims.yaml": "18 27 36 0.9 1.1 1.96",
    "benchmarks/llc/default_sampler.py": "1.3",
    "benchmarks/scale.py": "512",
    "benchmarks/scale.yaml": "256 48 4,608 2,048",
    "benchmarks/solvers/__init__.py": "0.1 0.01 0.001 1.01",
    "benchmarks/solvers/claims.yaml": "200 150",
    "benchmarks/solvers/importance.py": "4,096",
    "benchmarks/speed/__init__.py": "1.25 50 0.01",
    "ginger/cost/__init__.py": "2.21 3.3 5.1 2.3 5.6 16 32 0.99 0.9 0.999 1e-5 11e6 24e6",
    "ginger/cost/claims.yaml": "1e-7 0.1 0.9 0.9",
    "ginger/race.py": "0.05",
    "ginger/sensitivity.py": "1e-5",
    "ginger/summaries.py": "0.05",
    "ginger/tab1.py": "0.9 0.99 1e-5 1e-6 1e-4 1e-3 1e-6 1e-05 10,000 1e-5",
    "ginger/tab2.py": "0.9 0.99 1e-5 12.6 1e-5",
    "ginger/tab2.yaml": "12.6",
    "ginger/tab3.py": "1e-5",
    "ginger/tab3.yaml": "1e-5 1e-5",
    "ginger/tab4.yaml": "0.301",
    "lissa/appd.py": "0.1 0.1 10 90",
    "lissa/appd.yaml": "0.9",
    "lissa/fig1.yaml": "1e-8 1e-8 1e-8 1e-8 0.5 1e-6 1e-8 1e-6 0.5 1e-8 1e-8 1e-2",
    "lissa/fig1/__init__.py": "1e-6 0.5 1e-8 1e-2 1e-6 1e-6 1e-8",
    "lissa/fig2.py": "10 200 100",
    "lissa/fig2.yaml": "300 0.95 0.5",
    "lissa/fig3.py": "0.003 2.3 6e-4 0.47 20 1.3 780 1,000",
    "lissa/second_moments.py": "21",
    "lissa/tab1.yaml": "0.00018 256 64",
    "lissa/tab3.py": "2.55 2.67 1.45 2.04 3.2 8.9 5.4 14 20 5000 50 256",
    "lissa/tab3.yaml": "200 20 60 1,000 30,000",
    "lissa/thm1/__init__.py": "10 10 10 10 100 10 10 100",
    "ngd/branching.py": "0.25",
    "ngd/fig1.yaml": "1.1 32 300 100 100",
    "ngd/fig1/__init__.py": "1.9 1.9 4 0.25 60000 0.01",
    "ngd/fig2.py": "0.25",
    "ngd/fig2.yaml": "1.1 14 24 10",
    "ngd/fig3.py": "0.25 0.01 1e-10",
    "ngd/fig3.yaml": "1.1 16 16",
    "ngd/fig4.py": "0.01 0.01",
    "ngd/fig4.yaml": "1.1 128",
    "ngd/fig5.py": "60,000 1e-4 1e-4 1e-3 1e-2",
    "ngd/fig5.yaml": "256 10,000 1.1 20",
    "ngd/fig6.py": "60,000 1e-4 1e-2 1e-4",
    "ngd/fig6.yaml": "256 10,000 1.1",
    "ngd/fig7.yaml": "10 2 800 300 2 10 1.1 2.5 8e-5 5e-5 100",
    "ngd/fig8.yaml": "10 2 800 300 2 10 1.1 2.5 8e-5",
    "ngd/overfitting.py": "60000",
    "papers/derivations.py": "10,000 1.9 1.9",
    "papers/headlines.yaml": "10 500 1e-5",
    "papers/misprints.yaml": "0.000 20",
    "papers/pictures.yaml": "10",
    "pbrf/appg.yaml": "0.5 0.1 0.8 1.25",
    "pbrf/appg/__init__.py": "20 103 77 133 5000 10000 10 500",
    "pbrf/appg/claims.py": "1",
    "pbrf/correlations.py": "20 103 77 133 0.3 0.1 0.03 0.01 0.003 0.001",
    "pbrf/fig5.py": "0.1 0.9 10 90 0.5 0.000001 12",
    "pbrf/fig5.yaml": "0.1 25 20 2,000",
    "pbrf/fig6.py": "20 1024 1000 90 0.1 0.80",
    "pbrf/gaps.py": "0.000 0.0005",
    "pbrf/minima.py": "0.004 0.01 0.001",
    "pbrf/tab4.yaml": "1e-6 0.1 1e-6 0.1 1e-6 0.1",
    "pbrf/tab5.py": "1e-6 1e-4 1e-4 1e-2 1e-1 784 64 2 3 0.001 0.01 1000 200 10 5000 10000",
    "pbrf/tab5.yaml": "0.001 0.001",
    "pbrf/tab6.py": "20 0.1 0.3",
    "pbrf/tab6.yaml": "0.9 0.7 0.91 0.2 0.3 0.25 0.5 6,000 600 600 1,000",
    "pbrf/tab7.yaml": "0.85 0.9 0.85 0.71 0.2 0.3 0.45 0.5",
    "pbrf/tab8.py": "10",
    "pbrf/tab8.yaml": "0.25 0.2 0.28 0.35",
    "rank1/fig2.py": "0.1 112",
    "rank1/fig2.yaml": "20",
    "rank1/fisher.py": "2.3 20",
    "rank1/fisher.yaml": "2.8 20 1.4",
    "rank1/prop.py": "112",
    "rank1/prop.yaml": "5 1",
    "rank1/rate.py": "1e-12",
    "rank1/rate.yaml": "0.18",
}


def said_of(path: Path) -> list[str]:
    """Return what a file of experiments/ says beside its claims' statements and criteria."""
    if path.suffix == ".py":
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = (ast.Module, ast.FunctionDef, ast.ClassDef)
        told = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, named)}
        strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        return [each for each in strings if isinstance(each, str) and " " in each and each not in told]
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if "claims" not in content:  # findings, titles, misprints: what stands beside references
        return (
            [re.sub(r"\{[^{}]*\}|'(number|per)': (\[.*?\]|[^,]*)", "", str(content))]
            if path.name != "causes.yaml"
            else []
        )
    reasons = [reason for each in (content.get("not_asked") or {}).values() for reason in each.values()]
    claims = content["claims"].values()
    changes = [str(what) for claim in claims for each in claim.get("changed") or () for what in each.values()]
    history = [re.sub(r"20\d\d-\d\d-\d\d", "", what) for what in dict.fromkeys(changes)]
    return [*map(str, reasons), *(str(claim.get("why", "")) for claim in claims), *history]


def test_no_result_is_typed_in_what_is_said_of_claims() -> None:
    found = {}
    for path in sorted((ROOT / "experiments").rglob("*.*")):
        if path.suffix in (".py", ".yaml"):
            texts = [PLACES.sub("", text) for text in said_of(path)]
            numbers = [each for text in texts for each in re.findall(rf"{FRACTION}|{WHOLE}", text)]
            if path.suffix == ".py":  # what `make help TARGET` prints
                about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
                numbers = re.findall(FRACTION, PLACES.sub("", re.sub('ARGS=".*?"', "", about))) + numbers
            if numbers:
                found[path.relative_to(ROOT / "experiments").as_posix()] = " ".join(numbers)
    assert found == SAID


# --- The examples in docstrings of linalg, spectrum, solvers and of the modules beside the layers run as printed
SRC = Path(__file__).parents[1] / "src"
FILES = [*(SRC / "curvlab").glob("*.py")]
FILES += [path for room in ("linalg", "spectrum", "solvers") for path in (SRC / "curvlab" / room).rglob("*.py")]
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(SRC).with_suffix("").parts) for path in FILES if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run_as_printed(name: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert attempted > 0
    assert failed == 0
