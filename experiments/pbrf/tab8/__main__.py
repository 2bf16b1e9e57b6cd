"""python -m experiments.pbrf.tab8 [KEY=VALUE ...]."""

from experiments.pbrf.tab8 import TARGET
from experiments.target import main

main(TARGET)
