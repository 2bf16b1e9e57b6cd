"""python -m experiments.pbrf.tab8 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.pbrf.tab8 import TARGET

main(TARGET)
