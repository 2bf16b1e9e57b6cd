"""python -m experiments.lissa.tab1 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.lissa.tab1 import TARGET

main(TARGET)
