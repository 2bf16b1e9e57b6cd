"""python -m experiments.ngd.fig3 [KEY=VALUE ...]."""

from experiments.ngd.fig3 import TARGET
from experiments.target import main

main(TARGET)
