"""python -m experiments.benchmarks.influence_peers [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.benchmarks.influence_peers import TARGET

main(TARGET)
