"""python -m experiments.ngd.fig5 [KEY=VALUE ...]."""

from experiments.ngd.fig5 import TARGET
from experiments.target import main

main(TARGET)
