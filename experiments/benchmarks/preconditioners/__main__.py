"""python -m experiments.benchmarks.preconditioners [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.benchmarks.preconditioners import TARGET

main(TARGET)
