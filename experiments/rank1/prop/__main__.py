"""python -m experiments.rank1.prop [KEY=VALUE ...]."""

from experiments.rank1.prop import TARGET
from experiments.target import main

main(TARGET)
