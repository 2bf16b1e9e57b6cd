"""python -m experiments.lissa.tab1 [KEY=VALUE ...]."""

from experiments.lissa.tab1 import TARGET
from experiments.target import main

main(TARGET)
