"""python -m experiments.ngd.fig7 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.ngd.fig7 import TARGET

main(TARGET)
