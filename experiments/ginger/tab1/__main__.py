"""python -m experiments.ginger.tab1 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.ginger.tab1 import TARGET

main(TARGET)
