"""python -m experiments.rank1.fisher [KEY=VALUE ...]."""

from experiments.rank1.fisher import TARGET
from experiments.target import main

main(TARGET)
