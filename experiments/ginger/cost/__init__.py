"""Cost and exactness of Ginger and QNG (Ginger 2024, Sec. 2, 3; the FLOPs and memory of Table 1).

make ginger-cost PRESET=smoke|embedded|laptop|paper ARGS="ranks=[1,8] stream.batch_size=128"

The gradients are those of labels sampled along a training run of SGD, recorded once for each seed: both
optimizers, their own targets and the common one see the same. `table` has the errors of both, each holding τ
vectors, against

- the common target α^τ I + G_t, G_t the moving average from 0: what Ginger with γ = α^τ approximates, and what
  QNG has beside its low-rank part after τ updates; this is the comparison at equal memory;
- their own: γI + G_t for Ginger, α^t I + G_t (Eq. 7 from G_0 = I) for QNG.

`exact` checks what the paper states without exception: Eq. 10, the optimality of the cut, Observation 1 (the
rank is τ, not 2τ), and the two misprints: Algorithm 1's α-factors do not fit each other, and the β_t of QNG
reduces to 1 - α. `precision` compares keeping the inverse, as the paper has it, with keeping the matrix, in
single precision: without rounding they are the same, because κ = σ/(γ(γ + σ)) is monotone in σ. `eigenvalues`
is Lemma 1 along a training by Ginger; `descent` and `convergence` are Lemma 2 and Theorem 1 on softmax
regression, with L and M_g in closed form. The proof of Lemma 2 takes the matrix to be independent of the step's
example, which Algorithm 1's order of updates does not give where one batch serves both; it is checked as it is
proved.

`flops` counts products of matrices and convolutions on the networks of Table 1 (CIFAR stem, one batch of 128):
2 for each multiply-add, nothing elementwise. The forward pass is shared (train mode, BatchNorm by the batch's
statistics, both gradients through it) or the sampled labels' own (eval mode, as in the published code). The
paper's column, from JAX's profiler, cannot be that: its 2.21e9 is less than one example's gradient (3.3e9), and
it grows by 5.1 from ResNet-18 to ResNet-50, where products grow by 2.3 and the entries of activations by 5.6.
An inference: XLA's count leaves out calls to cuDNN and cuBLAS, so the column is of elementwise operations. That
would also be why it grows linearly in τ although the text says quadratically; the column of T5 (Table 2, all
weights) does grow quadratically, by 2d for each τ², as the product U V does. `steps` measures whole steps,
`scaling` and `fits` update and step alone. Seconds are processor time of this process (elapsed on a GPU): others
on the machine lengthen elapsed time.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Cost and approximation error of Ginger and QNG",
    paper={
        "ranks": "1, 2, 4, 8, 16, 32",
        "decays": "0.99 (Sec. 4.1), 0.9 to 0.999 (Table 3)",
        "dampings": "not stated; 1e-5 in the published code",
        "seeds": "not stated",
        "stream.num_steps": "no such stream",
        "stream.batch_size": "128",
        "flops.csv:batch_size": "128",
        "steps.csv:network": "ResNet-18, ResNet-50",
        "scaling.csv:num_parameters": "11e6 and 24e6",
        "theory.lr": "sum diverges, sum of squares does not",
    },
    timings=("fits", "seconds-to-adam*", "elapsed-to-adam*", "time-linear-in-parameters*", "time-in-rank*"),
)
