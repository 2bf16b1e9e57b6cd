"""python -m experiments.lissa.lemma1 [KEY=VALUE ...]."""

from experiments.lissa.lemma1 import TARGET
from experiments.target import main

main(TARGET)
