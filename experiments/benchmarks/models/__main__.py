"""python -m experiments.benchmarks.models [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.benchmarks.models import TARGET

main(TARGET)
