"""python -m experiments.benchmarks.retraining [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.benchmarks.retraining import TARGET

main(TARGET)
