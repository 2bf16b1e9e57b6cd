"""python -m experiments.ginger.tab2 [KEY=VALUE ...]."""

from experiments.ginger.tab2 import TARGET
from experiments.target import main

main(TARGET)
