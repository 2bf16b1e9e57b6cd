"""python -m experiments.pbrf.tab6 [KEY=VALUE ...]."""

from experiments.pbrf.tab6 import TARGET
from experiments.target import main

main(TARGET)
