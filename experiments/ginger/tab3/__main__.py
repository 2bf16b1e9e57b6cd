"""python -m experiments.ginger.tab3 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.ginger.tab3 import TARGET

main(TARGET)
