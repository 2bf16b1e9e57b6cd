"""python -m experiments.pbrf.appg [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.pbrf.appg import TARGET

main(TARGET)
