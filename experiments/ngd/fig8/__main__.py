"""python -m experiments.ngd.fig8 [KEY=VALUE ...]."""

from experiments.ngd.fig8 import TARGET
from experiments.target import main

main(TARGET)
