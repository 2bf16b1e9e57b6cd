"""python -m experiments.benchmarks.llc [KEY=VALUE ...]."""

from experiments.benchmarks.llc import TARGET
from experiments.target import main

main(TARGET)
