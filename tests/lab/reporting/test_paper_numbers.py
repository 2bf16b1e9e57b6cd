"""Every number typed in stands in the paper's text; the tables' own arithmetic is a second check."""

import re
from pathlib import Path

import pytest

from curvlab.lab import PaperNumber, load_paper_numbers
from tests.refusals import refuses

ROOT = Path(__file__).parents[3]
PAPERS = ROOT / "experiments" / "papers"
TEXTS = ROOT.parent / "shared" / "papers"
TEXT_FILES = {
    "ginger": "ginger_2024.txt",
    "lissa": "lissa_klochkov_liu_2024.txt",
    "ngd": "ngd_llc_saghir_2024.txt",
    "pbrf": "pbrf_bae_2022_appendix.txt",
    "rank1": "rank_one_semenov_2025_slides.txt",
}
NUMBERS = [
    (paper.stem, number)
    for paper in sorted(PAPERS.glob("*.csv"))
    for number in load_paper_numbers(paper.stem, folder=PAPERS).numbers
]
UNITS = {"M": 1e6, "B": 1e9}


def text_of(paper: str) -> str:
    path = TEXTS / TEXT_FILES[paper]
    if not path.is_file():
        pytest.skip(f"the papers' texts are not here ({path.name} in ../shared/papers)")
    return path.read_text(encoding="utf-8")


def read_quote(quote: str) -> tuple[float, float | None]:
    """Return value and standard error as the printed characters have them."""
    plain = re.fullmatch(r"(-?[\d.]+)(?: ± ([\d.]+))?", quote)
    if plain and ("±" in quote or quote.startswith("-")):
        return float(plain[1]), float(plain[2]) if plain[2] else None
    power = re.search(r"\\times 10\^\{(-?\d+)\}", quote)
    if power:
        factor = 10.0 ** int(power[1])
        mantissa = re.match(r"\(([\d.]+)\\pm ([\d.]+)\)|([\d.]+)", quote)
        if mantissa[1]:
            return float(mantissa[1]) * factor, float(mantissa[2]) * factor
        return float(mantissa[3]) * factor, None
    bare = re.search(r"(?<![\d.])([\d.]+)\^\{(-?\d+)\}$", quote)
    if bare:  # "10^{-2}", or the slip "1.9^{-31}" for 1.9 x 10^{-31}
        mantissa_digits = "1" if bare[1] == "10" else bare[1]
        return float(f"{mantissa_digits}e{bare[2]}"), None
    digits, unit = re.findall(r"(\d+(?:\.\d+)*(?:e-?\d+)?)([MB]?)", quote)[-1]
    quarter = digits[: len(digits) // 4]
    if quarter and digits == 4 * quarter:  # the texts print some numbers four times over: "5000500050005000"
        digits = quarter
    return float(digits) * UNITS.get(unit, 1), None


def test_the_reader_of_quotes() -> None:
    assert read_quote(r"(9.28\pm 0.35)\times 10^{-6}") == pytest.approx((9.28e-6, 0.35e-6))
    values = {
        "size of 5000500050005000": 5000, "4444 sequences": 4, "5.435.435.435.43": 5.43, "1.3B": 1.3e9,
        "11M": 11e6, "=1e-8": 1e-8, "lr =104.104=10^{-4}": 1e-4, "N=10^{4}": 1e4, "1.9^{-31}": 1.9e-31,
    }  # fmt: skip
    assert {quote: read_quote(quote)[0] for quote in values} == values
    assert read_quote(r"\epsilon=10^{-10}") == (1e-10, None)
    assert read_quote("0.208 ± 0.732") == (0.208, 0.732)
    assert read_quote("-0.11") == (-0.11, None)


GAPS = ["warm_start", "proximity", "non_convergence", "linearisation", "solver"]
COLD, TWO_STAGE = (["cold", "warm", "proximal_bregman"], ["two_stage", "warm", "proximal_bregman"])
COLUMNS = {"Table 4": GAPS, "Table 5": GAPS, "Table 6": COLD, "Table 7": COLD, "Table 8": TWO_STAGE}


def printed_cells(text: str, table: str) -> dict[tuple[str, str], str]:
    """Return a table of Bae et al. (2022): above its caption, with empty names where the row before has them."""
    lines = text[: text.index(f"\n{table}: ")].rstrip().splitlines()
    start = max(i for i, line in enumerate(lines) if not line.strip()) + 1
    by_gap = COLUMNS[table] == GAPS
    names, cells = ["", ""], {}
    for line in lines[start + 1 :] if by_gap else lines[start + 2 :]:
        row = line.split("\t")
        if by_gap:
            names = [found or before for found, before in zip(row[:2], names, strict=True)]
            columns, values, name = COLUMNS[table], row[2:], " ".join(names)
        else:
            columns = [f"{column}_{kind}" for column in COLUMNS[table] for kind in ("pearson", "spearman")]
            values, name = row[1:], row[0]
        cells |= {(name, column): value for column, value in zip(columns, values, strict=True)}
    return cells


def test_every_cell_of_the_tables_of_gaps_and_correlations_is_typed() -> None:
    text, numbers = text_of("pbrf"), load_paper_numbers("pbrf", folder=PAPERS)
    for table in COLUMNS:
        typed = {(number.row, number.column) for number in numbers.in_table(table)}
        assert typed == set(printed_cells(text, table)), table


@pytest.mark.parametrize(("paper", "number"), NUMBERS, ids=lambda entry: getattr(entry, "column", entry))
def test_number_stands_in_the_text(paper: str, number: PaperNumber) -> None:
    text = text_of(paper)
    if paper == "pbrf":
        text = printed_cells(text, number.table)[number.row, number.column]
        assert number.quote == text
    elif number.row != "all" and number.table.startswith("Table"):
        body = text[text.index(f"{number.table}: ") :]
        text = next(line for line in body.splitlines() if line.startswith(number.row))
    assert number.quote in text
    value, stderr = read_quote(number.quote)
    assert number.value == pytest.approx(value, rel=1e-12)
    if stderr is None:
        assert number.stderr != number.stderr  # nan
    else:
        assert number.stderr == pytest.approx(stderr, rel=1e-12)


NGD_FIGURES = [number for paper, number in NUMBERS if paper == "ngd" and number.table.startswith("Fig.")]


@pytest.mark.parametrize(
    "number", NGD_FIGURES, ids=lambda number: f"{number.table}, {number.row}, {number.column}"
)
def test_ngd_settings_stand_in_the_caption_of_their_figure(number: PaperNumber) -> None:
    # Captions repeat each other's settings. The lines of a figure's panels stand before its own, which ends it.
    caption: list[str] = []
    for line in text_of("ngd").splitlines():
        caption = [*caption, line] if line else []
        if line.startswith(f"{number.table.replace('Fig.', 'Figure')}:"):
            break
        if line.startswith("Figure "):
            caption = []
    if number.row.startswith("("):
        caption = [line for line in caption if line.startswith(number.row[:3])]
    assert any(number.quote in line for line in caption)


ROWS = ["ResNet-18", "ResNet-50", "OPT", "Llama-1", "Mistral"]


@pytest.mark.parametrize("row", ROWS)
def test_table_1_hyperparameters_end_the_printed_row(row: str) -> None:
    text = text_of("lissa")
    line = next(line for line in text[text.index("Table 1: ") :].splitlines() if line.startswith(row))
    numbers = load_paper_numbers("lissa", folder=PAPERS)
    printed = [numbers.get("Table 1", row, column).quote for column in ("step_size", "batch_size", "num_steps")]
    assert line.rstrip().endswith(" " + " ".join(printed))


@pytest.mark.parametrize("row", ROWS)
def test_arithmetic_of_the_tables(row: str) -> None:
    numbers = load_paper_numbers("lissa", folder=PAPERS)

    def value(table: str, column: str, of: str = row) -> float:
        return numbers.get(table, of, column).value

    rate = value("Table 1", "step_size") * value("Table 1", "damping", "all")
    assert 2 <= rate * value("Table 1", "num_steps") <= 2.5
    assert value("Table 1", "step_size") < 2 / value("Table 1", "lambda_max")
    assert value("Table 1", "lambda_max") == value("Table 3", "lambda_max")
    ratio = (value("Table 3", "frobenius_norm") / value("Table 3", "lambda_max")) ** 2
    assert value("Table 3", "squared_ratio") == pytest.approx(ratio, rel=5e-3)


def test_unknown_number_lists_what_there_is() -> None:
    numbers = load_paper_numbers("lissa", folder=PAPERS)
    with pytest.raises(KeyError, match=r"lissa.csv has no number \(all, lr\) in Fig. 1; .*\(all, epsilon\)"):
        numbers.get("Fig. 1", "all", "lr")
    refuses("nothing in that table", numbers.get, "Fig. 99", "all", "lr", error=KeyError)


def test_refuses_missing_wrong_and_repeated(tmp_path: Path) -> None:
    refuses(r"pbrf\.csv", load_paper_numbers, "pbrf", error=FileNotFoundError, folder=tmp_path)
    (tmp_path / "a.csv").write_text("table,value\nTable 1,2\n")
    refuses(r"a.csv needs the columns .*quote, got table,value", load_paper_numbers, "a", folder=tmp_path)
    row = "Table 1,all,damping,5,,,5\n"
    (tmp_path / "b.csv").write_text("table,row,column,value,stderr,unit,quote\n" + 2 * row)
    refuses(r"b.csv has \('Table 1', 'all', 'damping'\) twice", load_paper_numbers, "b", folder=tmp_path)
