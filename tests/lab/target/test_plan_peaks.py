"""Peaks of units: closed forms of vectors, and every LiSSA preset of the paper on a machine that exists."""

from __future__ import annotations

import pytest

from curvlab.lab.target.plan.peaks import drawn_numbers, fits, unit_peaks
from curvlab.lab.target.plan.sizes import sizes_of

MLP = {
    "data": {"_target_": "curvlab.lab.data.load_mnist", "num_train": 500},
    "model": {"_target_": "curvlab.lab.models.MLP", "hidden_sizes": [64], "activation": "tanh"},
}


def test_peaks_are_a_product_and_vectors() -> None:
    sizes = sizes_of(MLP)
    settings = {
        "spectrum": {"trace_probes": 64, "rtol": 0.01},
        "sketch": {"size": 500},
        "constant": {"num_leading": 2, "num_random": 3},
    }
    found = unit_peaks(settings, sizes)
    vector, product = 4 * sizes.num_parameters, sizes.peak_bytes(1)
    numbers = {unit: (peak - product) / vector for unit, peak in found.items()}
    assert numbers == pytest.approx({"trace": 96, "lambda_max": 9, "sketch": 1500, "C": 18})
    row_by_row = unit_peaks({"sketch": {"size": 500, "chunk_size": 1}}, sizes)
    assert (row_by_row["sketch"] - product) / vector == pytest.approx(5)
    assert unit_peaks({"spectrum": {"rtol": 0.1}}, sizes).keys() == {"lambda_max"}


def test_lambda_max_has_no_peak_where_all_that_follows_from_it_is_given() -> None:
    sizes, spectrum = sizes_of(MLP), {"trace_probes": 8, "rtol": 0.01}
    given = {"step_size": 0.003, "batch_size": 100, "num_steps": 150}
    for settings, found in (
        ({"damping": 5.0, "lissa": given}, {"trace"}),
        ({"damping": None, "lissa": given}, {"trace", "lambda_max"}),
        ({"damping": 5.0, "lissa": given | {"batch_size": None}}, {"trace", "lambda_max"}),
        ({"damping": 5.0, "lissa_check": None}, {"trace"}),
        ({"damping": 5.0, "lissa_check": {"sentences": 2}}, {"trace", "lambda_max"}),
        ({"damping": 5.0}, {"trace", "lambda_max"}),  # a table that shows it
    ):
        assert unit_peaks({"spectrum": spectrum} | settings, sizes).keys() == found


def test_a_sketch_draws_its_rows_again_for_every_group() -> None:
    sizes = sizes_of(MLP)
    vector = 4 * sizes.num_parameters
    settings = {"sketch": {"size": 100, "chunk_size": 1}}
    # 23 vectors fit beside the parameters: products of 10 rows; half of the rows again for each of 10 groups.
    found = drawn_numbers(settings, sizes, memory=vector + 23.01 * vector / 0.8)
    assert found == pytest.approx(100 * (1 + 5) * sizes.num_parameters)
    everything = drawn_numbers(settings, sizes, memory=1e12)
    assert everything == pytest.approx(2 * 100 * sizes.num_parameters)


def test_machines() -> None:
    assert [fits(bytes_) for bytes_ in (79e9, 81e9, 600e9, 700e9)] == [
        "one GPU of 80 GB",
        "4 x 80 GB",
        "8 x 80 GB",
        "more than 8 x 80 GB",
    ]
