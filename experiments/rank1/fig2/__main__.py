"""python -m experiments.rank1.fig2 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.rank1.fig2 import TARGET

main(TARGET)
