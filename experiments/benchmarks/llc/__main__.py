"""python -m experiments.benchmarks.llc [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.benchmarks.llc import TARGET

main(TARGET)
