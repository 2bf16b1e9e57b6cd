"""python -m experiments.lissa.fig2 [KEY=VALUE ...]."""

from experiments.lissa.fig2 import TARGET
from experiments.target import main

main(TARGET)
