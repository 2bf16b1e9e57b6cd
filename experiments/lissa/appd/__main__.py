"""python -m experiments.lissa.appd [KEY=VALUE ...]."""

from experiments.lissa.appd import TARGET
from experiments.target import main

main(TARGET)
