"""python -m experiments.rank1.rate [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.rank1.rate import TARGET

main(TARGET)
