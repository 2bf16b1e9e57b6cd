"""python -m experiments.pbrf.tab6 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.pbrf.tab6 import TARGET

main(TARGET)
