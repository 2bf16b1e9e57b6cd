"""python -m experiments.benchmarks.preconditioners [KEY=VALUE ...]."""

from experiments.benchmarks.preconditioners import TARGET
from experiments.target import main

main(TARGET)
