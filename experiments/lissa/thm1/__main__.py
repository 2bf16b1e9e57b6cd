"""python -m experiments.lissa.thm1 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.lissa.thm1 import TARGET

main(TARGET)
