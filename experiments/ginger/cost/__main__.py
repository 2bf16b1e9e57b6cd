"""python -m experiments.ginger.cost [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.ginger.cost import TARGET

main(TARGET)
