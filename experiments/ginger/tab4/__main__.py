"""python -m experiments.ginger.tab4 [KEY=VALUE ...]."""

from experiments.ginger.tab4 import TARGET
from experiments.target import main

main(TARGET)
