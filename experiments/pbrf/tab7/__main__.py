"""python -m experiments.pbrf.tab7 [KEY=VALUE ...]."""

from experiments.pbrf.tab7 import TARGET
from experiments.target import main

main(TARGET)
