"""python -m experiments.ngd.fig3 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.ngd.fig3 import TARGET

main(TARGET)
