"""Ten models of transformers and torchvision: memory, time and rounding of one product.

make bench-models PRESET=smoke|embedded|laptop|paper ARGS="models.bert.batch_size=8"

**Memory** of one product with one vector, over that of one gradient step (forward, backward, SGD without
momentum: the cheapest step there is). Memory is all that a computation holds at its peak: parameters, buffers
and the batch, the vector that is given, and what rises during the call, the product or the gradients included.
It is the rise of the process's resident memory, in a process of its own, because that is what decides whether a
computation fits, and because it sees what PyTorch's allocator does not, such as the work space of convolutions.
For that the allocator gives every freed block of 64 KiB or more back at once, a first call that is not counted
loads what is loaded lazily, and a model whose gradient step rises by less than 50 MiB is not judged. Repeats
still differ, by up to a fifth in the first trials (smaller blocks, and what Python has not collected yet), so
each is a row in repeats.csv, and ratios have intervals. The same ratio for what rises alone stands beside.

The gradient is the user's: attention by the fused kernel, which keeps no attention weights. A product runs by
plain kernels, since the fused ones have no forward mode, and holds the weights of every head and layer; a
gradient step by plain kernels is measured, too, and tells how much of a ratio that is; so is a product by finite
differences, which holds no tangents. A product with `low_memory=True` (two passes, see
`curvlab.curvature.two_passes`) has a claim of its own: that option was made for this aim. Where a batch is so
small that parameters outweigh activations, the ratio tends to 3/2 and more: a product holds the vector and
itself where a gradient step holds the gradient (2 for a single layer: its gradient is there before it is added
to the product).

**Time** of a product over its floor, two forwards and one gradient, all in turn, round by round, CPU seconds of
one process (elapsed on a GPU).

**Rounding**: products with bf16 and fp16 parameters, inputs and vectors, whose kernels add up in fp32, against
float64, ‖Δ‖_F / ‖·‖_F over some random vectors of the weights' norm: at the same rounded parameters, inputs and
vectors (the products' own error), and at those before they were rounded (what a user who converts a model
sees). The data come as one batch and one example at a time: sums over batches are kept in the model's
precision. A kernel that does not exist says so.

Weights are random (as the library of the model draws them), tokens and pixels too. All models are built from the
configs below; nothing is loaded.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Ten models: memory, time and rounding of one product",
    judge=".claims:judge_claims",
    paper={"num_threads": "", "num_repeats": "", "num_rounds": ""},  # no paper measures these
)
