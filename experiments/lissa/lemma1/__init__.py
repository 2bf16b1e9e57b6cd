"""Lemma 1: the mean of LiSSA converges and its second moment diverges (Klochkov & Liu 2024, App. B.4).

make lissa-lemma1 PRESET=smoke|embedded|laptop|paper ARGS="num_trials=10000"

The lemma's binary task, over spectra and dimensions (trials.py): trials of `Lissa` from u_0 = 0 for the
gradient of one example, and of the same iteration with g = 0 from the start that grows fastest, against the exact
recursion of the second moments (moments.py), for |B| below and above both thresholds: the paper's, and the one
where the recursion's spectral radius is 1. Only t <= 20: later E‖u_t‖² is carried by trials too rare to be drawn.
For the same reason a diverging second moment does not say what a single run does: the growth of the typical trial,
log‖u_t‖ / t, is measured beside it.

Misprints that matter: in this task E H_t² - H² is (tr(H) H - H²) / |B|, not tr(H) H / |B|; the proof's R_k is not
R^k (see moments.py); λ is both the damping and the eigenvalue of R; an eigenvalue of exactly 1 gives a bounded
second moment.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Lemma 1: mean and second moment",
    paper={
        "thresholds.csv:spectrum": "any",
        "thresholds.csv:size": "any",
        "dampings": "any",
        "trial_dampings": "any",
        "num_trials": "expectation",
        "num_steps": "limit",
    },
)
