"""python -m experiments.benchmarks.attribution [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.benchmarks.attribution import TARGET

main(TARGET)
