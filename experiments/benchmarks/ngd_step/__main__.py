"""python -m experiments.benchmarks.ngd_step [KEY=VALUE ...]."""

from experiments.benchmarks.ngd_step import TARGET
from experiments.target import main

main(TARGET)
