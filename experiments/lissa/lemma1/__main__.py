"""python -m experiments.lissa.lemma1 [KEY=VALUE ...]."""

from curvlab.lab.target import main
from experiments.lissa.lemma1 import TARGET

main(TARGET)
