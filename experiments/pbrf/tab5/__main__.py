"""python -m experiments.pbrf.tab5 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.pbrf.tab5 import TARGET

main(TARGET)
