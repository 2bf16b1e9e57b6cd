"""python -m experiments.ngd.fig7 [KEY=VALUE ...]."""

from experiments.ngd.fig7 import TARGET
from experiments.target import main

main(TARGET)
