"""python -m experiments.lissa.fig1 [KEY=VALUE ...]."""

from experiments.lissa.fig1 import TARGET
from experiments.target import main

main(TARGET)
