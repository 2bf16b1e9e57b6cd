"""python -m experiments.rank1.fig1 [KEY=VALUE ...]."""

from experiments.rank1.fig1 import TARGET
from experiments.target import main

main(TARGET)
