"""python -m experiments.ngd.fig5 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.ngd.fig5 import TARGET

main(TARGET)
