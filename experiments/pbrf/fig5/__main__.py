"""python -m experiments.pbrf.fig5 [KEY=VALUE ...]."""

from experiments.pbrf.fig5 import TARGET
from experiments.target import main

main(TARGET)
