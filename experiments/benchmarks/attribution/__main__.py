"""python -m experiments.benchmarks.attribution [KEY=VALUE ...]."""

from experiments.benchmarks.attribution import TARGET
from experiments.target import main

main(TARGET)
