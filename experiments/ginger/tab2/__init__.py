"""T5 for summarisation, all weights or LoRA adapters: Ginger, QNG, Adam, momentum (Ginger 2024, Table 2).

make ginger-tab2 PRESET=smoke|embedded|laptop|paper ARGS="ranks=[4] seeds=range(5)"

One epoch over pairs of a document and its summary, batches of 4, no schedule and no weight decay, momentum 0.9 and
second-moment decay 0.99. Every fine-tuning of a column starts from the same pretrained weights; those of one seed
see the same batches and, with LoRA (rank 8 on every projection of every attention, which is what the FLOPs of the
paper's table imply; it says "each attention adapter"), start from the same adapters. The paper starts from the
published T5-small. The small presets cannot, so they pretrain a small T5 to copy what stretches of the training
documents begin with; both columns start from it.

Every racer tunes its learning rate, and Ginger its damping as well, with the same number of gradients (a step of
Ginger and QNG takes two, so their trainings are shorter: tuning.csv) for each column, at one rank, by the
validation loss. The damping is a number without
clipping, or the published code's 1e-5 with each entry of the update clipped at 1; where the latter is chosen, one
more row shows what it does without any curvature. The curvature sees labels that the model draws token by token,
given the words before them (teacher forcing), scaled by the root of the number of tokens, as the loss is their
mean; Eq. 8 has the number of sequences there. One matrix for all trained weights; `ginger-tab1` compares that with
one for each tensor.

ROUGE is of summaries that the model writes for the test documents after the epoch, the most probable token at each
step; the paper reports the best of its evaluations of each kind. How its training perplexity was taken is not said
of Table 2; of Table 1 (Sec. 4.1) training losses are "on sampled batches". Ours is of the last model on the first
pairs of the training set, of which a run shorter than an epoch has seen a part; beside it the smallest of a batch.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="T5 for summarisation, full and LoRA: Ginger, QNG and first-order methods",
    paper={
        "tasks": ["T5-small on XSum"],
        "table.csv:train_pairs": 204000,
        "table.csv:test_pairs": 11000,
        "batch_size": 4,
        "num_epochs": 1,
        "source_length": 512,
        "target_length": 128,
        "adapters.rank": 8,
        "adapters.alpha": "not stated",
        "ranks": [1, 2, 4, 8, 16, 32],
        "lrs": [0.1, 0.5, 0.01, 0.05, 0.001, 0.005, 0.0001, 0.0005],
        "tuning.num_gradients": "not stated",
        "seeds": "not stated",
        "measuring.num_beams": "not stated",
        "table.csv:damping": "not stated; 1e-5 in the published code",
        "table.csv:clip": "not mentioned; 1 in the published code",
    },
)
