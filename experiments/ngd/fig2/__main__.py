"""python -m experiments.ngd.fig2 [KEY=VALUE ...]."""

from experiments.ngd.fig2 import TARGET
from experiments.target import main

main(TARGET)
