"""python -m experiments.benchmarks.curvature [KEY=VALUE ...]."""

from experiments.benchmarks.curvature import TARGET
from experiments.target import main

main(TARGET)
