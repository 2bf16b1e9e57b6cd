"""python -m experiments.ngd.fig2 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.ngd.fig2 import TARGET

main(TARGET)
