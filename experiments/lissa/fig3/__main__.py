"""python -m experiments.lissa.fig3 [KEY=VALUE ...]."""

from experiments.lissa.fig3 import TARGET
from experiments.target import main

main(TARGET)
