"""python -m experiments.benchmarks.ngd_step [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.benchmarks.ngd_step import TARGET

main(TARGET)
