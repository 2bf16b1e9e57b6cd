"""python -m experiments.rank1.fig2 [KEY=VALUE ...]."""

from experiments.rank1.fig2 import TARGET
from experiments.target import main

main(TARGET)
