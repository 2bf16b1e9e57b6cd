"""python -m experiments.benchmarks.solvers [KEY=VALUE ...]."""

from experiments.benchmarks.solvers import TARGET
from experiments.target import main

main(TARGET)
