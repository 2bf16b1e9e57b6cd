"""python -m experiments.pbrf.fig6 [KEY=VALUE ...]."""

from experiments.pbrf.fig6 import TARGET
from experiments.target import main

main(TARGET)
