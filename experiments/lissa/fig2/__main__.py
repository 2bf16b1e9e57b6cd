"""python -m experiments.lissa.fig2 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.lissa.fig2 import TARGET

main(TARGET)
