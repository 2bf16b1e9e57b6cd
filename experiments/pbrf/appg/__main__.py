"""python -m experiments.pbrf.appg [KEY=VALUE ...]."""

from experiments.pbrf.appg import TARGET
from experiments.target import main

main(TARGET)
