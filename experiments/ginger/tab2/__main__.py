"""python -m experiments.ginger.tab2 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.ginger.tab2 import TARGET

main(TARGET)
