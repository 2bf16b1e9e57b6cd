"""python -m experiments.ngd.fig6 [KEY=VALUE ...]."""

from experiments.ngd.fig6 import TARGET
from experiments.target import main

main(TARGET)
