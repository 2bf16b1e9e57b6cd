"""python -m experiments.ginger.tab3 [KEY=VALUE ...]."""

from experiments.ginger.tab3 import TARGET
from experiments.target import main

main(TARGET)
