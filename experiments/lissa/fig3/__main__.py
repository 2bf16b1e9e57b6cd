"""python -m experiments.lissa.fig3 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.lissa.fig3 import TARGET

main(TARGET)
