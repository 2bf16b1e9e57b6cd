"""Influence scores of the public libraries against exact ones: correlation, time, memory.

make bench-influence-peers PRESET=smoke|embedded|laptop|paper ARGS="peers_python=DIR/bin/python"

The influence of all training digits on some test digits, -∇l(test)ᵀ (G + damping I)⁻¹ ∇l(point), with an MLP that
is trained to a small loss. The reference is solved in double precision to a residual of 1e-6. Every method runs in
a process of its own, one thread, and is measured from the trained model to the scores. Time is processor time: the
seconds on an idle machine, whatever else runs. Correlation is Pearson's over the training digits, query by query:
a library may scale its scores as it likes.

Libraries whose dependencies exclude ours (pyDVL wants numpy below 2) live in an environment of their own, the
extra `peers`; its Python is the setting `peers_python` or the environment variable CURVLAB_PEERS_PYTHON. Without
one their rows say "not installed".
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Influence scores of the public libraries",
    paper={"num_queries": "", "damping": "", "num_repeats": "", "num_threads": ""},  # no paper compares these
)
