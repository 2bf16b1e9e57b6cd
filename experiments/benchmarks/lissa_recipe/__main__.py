"""python -m experiments.benchmarks.lissa_recipe [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.benchmarks.lissa_recipe import TARGET

main(TARGET)
