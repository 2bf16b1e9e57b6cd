"""python -m experiments.rank1.prop [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.rank1.prop import TARGET

main(TARGET)
