"""python -m experiments.benchmarks.finite_differences [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.benchmarks.finite_differences import TARGET

main(TARGET)
