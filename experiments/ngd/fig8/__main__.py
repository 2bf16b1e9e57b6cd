"""python -m experiments.ngd.fig8 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.ngd.fig8 import TARGET

main(TARGET)
