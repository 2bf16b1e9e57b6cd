"""python -m experiments.ngd.fig4 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.ngd.fig4 import TARGET

main(TARGET)
