"""python -m experiments.ginger.tab1 [KEY=VALUE ...]."""

from experiments.ginger.tab1 import TARGET
from experiments.target import main

main(TARGET)
