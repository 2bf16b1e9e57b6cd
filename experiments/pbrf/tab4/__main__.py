"""python -m experiments.pbrf.tab4 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.pbrf.tab4 import TARGET

main(TARGET)
