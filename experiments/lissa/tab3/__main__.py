"""python -m experiments.lissa.tab3 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.lissa.tab3 import TARGET

main(TARGET)
