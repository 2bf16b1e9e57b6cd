"""python -m experiments.pbrf.fig6 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.pbrf.fig6 import TARGET

main(TARGET)
