"""python -m experiments.lissa.tab3 [KEY=VALUE ...]."""

from experiments.lissa.tab3 import TARGET
from experiments.target import main

main(TARGET)
