"""python -m experiments.ginger.cost [KEY=VALUE ...]."""

from experiments.ginger.cost import TARGET
from experiments.target import main

main(TARGET)
