"""python -m experiments.benchmarks.lissa_recipe [KEY=VALUE ...]."""

from experiments.benchmarks.lissa_recipe import TARGET
from experiments.target import main

main(TARGET)
