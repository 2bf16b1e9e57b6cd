"""python -m experiments.ngd.fig4 [KEY=VALUE ...]."""

from experiments.ngd.fig4 import TARGET
from experiments.target import main

main(TARGET)
