"""python -m experiments.benchmarks.models [KEY=VALUE ...]."""

from experiments.benchmarks.models import TARGET
from experiments.target import main

main(TARGET)
