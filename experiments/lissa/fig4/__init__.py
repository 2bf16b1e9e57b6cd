"""Both sides of condition C.1 against the batch size (Klochkov & Liu 2024, Fig. 4, App. B.3).

make lissa-fig4 PRESET=smoke|embedded|laptop|paper ARGS="task=mlp_64_64_digits data=mnist"

The condition is E G̃² - G² ⪯ C tr(G) G / |B|. As in the paper, the traces of both sides, over P, from random
quadratic forms, for four batch sizes and each model; here with standard errors, a fitted log-log slope, and for
language models |B| in tokens. For batches drawn with replacement the left side is (E G_i² - G²) / |B|, G_i of one
example: the slope -1 is an identity, of images and sequences alike, and says nothing about C. What can fail is the
level, and with it the constant: in the trace, which averages over all directions, and in single directions, where
the condition must hold too and C is measured as in lissa-tab1 (a lower bound). For language models also batches of
independent tokens, so that what the tokens of one sequence have in common (B.3: incoherence) shows.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Both sides of condition C.1 against the batch size",
    paper={
        "tasks": ["ResNet-18", "ResNet-50", "OPT-1.3B"],
        "condition.batch_sizes": "four for each model, not stated",
        "condition.num_realizations": 1000,
        "assumed_constant": 2.0,
    },
    after=("lissa/tab1",),
)
