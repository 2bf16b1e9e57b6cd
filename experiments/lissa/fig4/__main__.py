"""python -m experiments.lissa.fig4 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.lissa.fig4 import TARGET

main(TARGET)
