"""python -m experiments.lissa.fig4 [KEY=VALUE ...]."""

from experiments.lissa.fig4 import TARGET
from experiments.target import main

main(TARGET)
