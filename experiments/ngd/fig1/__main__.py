"""python -m experiments.ngd.fig1 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.ngd.fig1 import TARGET

main(TARGET)
