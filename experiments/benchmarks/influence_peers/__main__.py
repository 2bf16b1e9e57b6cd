"""python -m experiments.benchmarks.influence_peers [KEY=VALUE ...]."""

from experiments.benchmarks.influence_peers import TARGET
from experiments.target import main

main(TARGET)
