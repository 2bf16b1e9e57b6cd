"""python -m experiments.ginger.tab4 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.ginger.tab4 import TARGET

main(TARGET)
