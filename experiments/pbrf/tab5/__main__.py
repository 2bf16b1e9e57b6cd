"""python -m experiments.pbrf.tab5 [KEY=VALUE ...]."""

from experiments.pbrf.tab5 import TARGET
from experiments.target import main

main(TARGET)
