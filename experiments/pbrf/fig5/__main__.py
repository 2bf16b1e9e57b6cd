"""python -m experiments.pbrf.fig5 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.pbrf.fig5 import TARGET

main(TARGET)
