"""python -m experiments.lissa.thm1 [KEY=VALUE ...]."""

from experiments.lissa.thm1 import TARGET
from experiments.target import main

main(TARGET)
