"""python -m experiments.benchmarks.solvers [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.benchmarks.solvers import TARGET

main(TARGET)
