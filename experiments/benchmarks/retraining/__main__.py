"""python -m experiments.benchmarks.retraining [KEY=VALUE ...]."""

from experiments.benchmarks.retraining import TARGET
from experiments.target import main

main(TARGET)
