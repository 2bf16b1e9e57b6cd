"""python -m experiments.pbrf.tab7 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.pbrf.tab7 import TARGET

main(TARGET)
