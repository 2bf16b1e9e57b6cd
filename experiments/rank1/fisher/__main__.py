"""python -m experiments.rank1.fisher [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.rank1.fisher import TARGET

main(TARGET)
