"""python -m experiments.ngd.fig6 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.ngd.fig6 import TARGET

main(TARGET)
