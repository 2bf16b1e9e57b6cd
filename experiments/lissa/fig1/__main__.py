"""python -m experiments.lissa.fig1 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.lissa.fig1 import TARGET

main(TARGET)
