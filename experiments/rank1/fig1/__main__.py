"""python -m experiments.rank1.fig1 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.rank1.fig1 import TARGET

main(TARGET)
