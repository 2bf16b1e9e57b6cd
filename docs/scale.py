"""The table of docs/scale.md, by arithmetic: what products with vectors of large models take. Prints it."""

from __future__ import annotations

GB, TB = 1e9, 1e12
FLOAT32 = 4  # bytes
TOKENS = 256  # of a sequence

OPT = {"width": 2048, "layers": 24, "vocabulary": 50272, "positions": 2050, "inner": 8192}
LLAMA = {"width": 4096, "layers": 32, "vocabulary": 32000, "inner": 11008}


def opt_parameters(width: int, layers: int, vocabulary: int, positions: int, inner: int) -> int:
    """Return the number of parameters of OPT, whose output layer is the embedding."""
    attention = 4 * (width * width + width)
    mlp = 2 * width * inner + inner + width
    return (vocabulary + positions) * width + layers * (attention + mlp + 4 * width) + 2 * width


def llama_parameters(width: int, layers: int, vocabulary: int, inner: int) -> int:
    """Return the number of parameters of Llama, whose output layer is its own."""
    return 2 * vocabulary * width + layers * (4 * width**2 + 3 * width * inner + 2 * width) + width


def table() -> str:
    """Return the table, in Markdown."""
    models = {"OPT-1.3B": (opt_parameters(**OPT), OPT), "Llama-7B": (llama_parameters(**LLAMA), LLAMA)}
    rows: dict[str, list[str]] = {
        "parameters": [f"{size:,}" for size, _ in models.values()],
        "a vector of their size, float32": [_gb(size) for size, _ in models.values()],
        "parameters and three vectors, what a product holds beside activations": [
            _gb(4 * size) for size, _ in models.values()
        ],
        "the same, cut up over four GPUs, each": [_gb(size) for size, _ in models.values()],
        "a right-hand side more of a block solver: a vector and its product": [
            _gb(2 * size) for size, _ in models.values()
        ],
        f"operations of a product with one sequence of {TOKENS} tokens: five forwards": [
            f"{5 * 2 * TOKENS * (size - _looked_up(shape)):.1e}" for size, shape in models.values()
        ],
        "250 rows of a sketch held at once": [
            f"{250 * size * FLOAT32 / TB:.2f} TB" for size, _ in models.values()
        ],
    }
    lines = [f"| | {' | '.join(models)} |", "|---" * (len(models) + 1) + "|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())])


def _looked_up(shape: dict[str, int]) -> int:
    """Return the parameters that a token picks a row of: OPT's embedding is its output layer, too."""
    return shape.get("positions", shape["vocabulary"]) * shape["width"]


def _gb(numbers: int) -> str:
    return f"{numbers * FLOAT32 / GB:.1f} GB"


if __name__ == "__main__":
    print(table())
