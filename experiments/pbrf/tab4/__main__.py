"""python -m experiments.pbrf.tab4 [KEY=VALUE ...]."""

from experiments.pbrf.tab4 import TARGET
from experiments.target import main

main(TARGET)
