"""python -m experiments.ngd.fig1 [KEY=VALUE ...]."""

from experiments.ngd.fig1 import TARGET
from experiments.target import main

main(TARGET)
