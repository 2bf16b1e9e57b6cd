"""python -m experiments.benchmarks.finite_differences [KEY=VALUE ...]."""

from experiments.benchmarks.finite_differences import TARGET
from experiments.target import main

main(TARGET)
