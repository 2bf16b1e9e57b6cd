"""python -m experiments.benchmarks.curvature [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.benchmarks.curvature import TARGET

main(TARGET)
