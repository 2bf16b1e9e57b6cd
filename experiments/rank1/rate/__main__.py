"""python -m experiments.rank1.rate [KEY=VALUE ...]."""

from experiments.rank1.rate import TARGET
from experiments.target import main

main(TARGET)
