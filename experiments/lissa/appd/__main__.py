"""python -m experiments.lissa.appd [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.lissa.appd import TARGET

main(TARGET)
