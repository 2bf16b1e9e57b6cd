"""Time and memory: of Gauss-Newton products, on ten models, of an optimizer's step, and by finite differences.

make bench-speed PRESET=smoke|embedded|laptop|paper ARGS="parts=[products] products.num_vectors=[1,100]"

Weights and data are random but for the finite differences'. Everything takes turns, round by round, in one
process, so that a busy machine slows all alike: read ratios, not milliseconds. Time is processor time on a CPU
(with one thread what an idle machine takes, whatever else runs), elapsed time on a GPU.

**Products** (products.csv) with one and with many vectors, by us, curvlinops and PyHessian, beside what cannot be
saved. One product needs the outputs' derivative along a vector (about two forwards, one of which the gradient
needs too) and one gradient: the floor for one vector is two forwards and one gradient. For K vectors on one batch
the forward and its activations are shared; the aim is stated per vector (`aim_many`). Vectors lie as each library
wants them: ours and curvlinops' as (P, K), ours with contiguous columns. PyHessian multiplies by the Hessian, one
vector at a time; without the package its rows say "not installed".

On an H200 (preset paper) these networks are too small to fill the GPU: a product is as long as its launches, for
one vector above the aim and half to two thirds of curvlinops' time. The OPT's 25 backwards, then taken in turns,
took six times as long as curvlinops'; since then they go together (not timed again).

product_parts.csv times a product with 25 vectors by parts, over one forward and one gradient. A vector alone takes
a forward that carries its tangent (three convolutions a layer: W x, W dx, dW x) and a backward (two more): 5F
beside a floor of 4F, so 1.25 is the least for vectors in turns, each of which computes W x anew. `columns="vmap"`
computes it once, which leaves 4F + F/25 a vector. It is not the default for convolutions on a CPU: small networks
take longer by it, and it holds the tangents' activations of eight vectors.

product_ways.csv times a product with one vector in forward mode, the default, and in two passes
(`low_memory=True`), each also with weights and images as `channels_last`, and the gradient in both formats.
`to_default` is over forward mode in PyTorch's own format, of a gradient over the gradient in that: means over
rounds, t intervals.

**Models** (models.csv): ten of transformers and torchvision. Memory of one product with one vector, over that of
one gradient step (forward, backward, SGD without momentum: the cheapest step there is): all that a computation
holds at its peak, parameters, buffers, batch and the given vector included. It is the rise of the resident memory
of a process of its own, because that decides whether a computation fits, and sees what PyTorch's allocator does
not, such as the work space of convolutions. For that the allocator gives every freed block of 64 KiB or more back
at once, a first call loads what is loaded lazily, and a model whose gradient step rises by less than 50 MiB is not
judged. Repeats still differ, by up to a fifth (smaller blocks, what Python has not collected yet):
model_repeats.csv.

The gradient is the user's: attention by the fused kernel, which keeps no attention weights. A product runs by
plain kernels, since the fused ones have no forward mode, and holds the weights of every head and layer. A gradient
step by plain kernels, a product by finite differences, which holds no tangents, and one with `low_memory=True`
(two passes, see `curvlab.curvature.linearise`) stand beside it. Where parameters outweigh activations, the ratio
tends to 3/2 and more: a product holds the vector and itself where a gradient step holds the gradient.

Rounding (model_rounding.csv): products with bf16 and fp16 parameters, inputs and vectors of the weights' norm,
whose kernels add up in fp32, against float64, ‖Δ‖_F / ‖·‖_F: at the same rounded numbers (`error`), and at those
before they were rounded (`error_converted`: what a user who converts a model sees); in one batch and one by one,
since sums over batches are kept in the model's precision.

**Steps** (steps.csv, step_summary.csv): `optimizer.step()` of NGD, Adam and SGD on random gradients. NGD updates
its estimates in one of every `update_period` calls after the first ten, so a whole period after those is timed.
"products" is NGD's large matrix products alone, in the same period; "floor" adds the eigendecompositions of the
updates. On a CPU, Adam's own time has two values, a factor of 2 apart: where the C library hands the memory of its
temporaries back after every use, each step takes page faults. So the ratio to Adam has two values, too.

step_ranks.csv has one model at several ranks, step_parts.csv what a step of a small network is made of, call by
call. LeNet-5's, of ten tensors and 18 axes, takes as long as its calls of PyTorch alone: Python around them adds
nothing that could be spared. The FFNN of 256-256 is above three steps of Adam by its products alone, and so is
ResNet-18 at the default rank, 80.

**Finite differences** (differences.csv, difference_summary.csv): the error of G v against the step, in both
precisions, against forward mode in fp64. Klochkov & Liu (2024), Sec. 2, compute J v by [h(θ + δv) - h(θ - δv)] /
2δ with δ = 0.01 for vectors of any norm; the step here is the norm of the perturbation, δ‖v‖. Too large a step
meets the curvature of the outputs, or the kinks of a ReLU network; too small a one rounding, of size machine
epsilon over step.
"""

from __future__ import annotations

from curvlab.lab import Target
from experiments.benchmarks.parts import of_parts
from experiments.benchmarks.speed import differences, models, products, steps

TARGET = Target(
    __name__,
    title="Time and memory: products, models, steps, finite differences",
    paper={  # no paper measures these; Klochkov & Liu give δ = 0.01, which is no norm, and no error
        "products.num_rounds": "",
        "models.num_rounds": "",
        "models.num_repeats": "",
        "steps.num_repeats": "",
        "steps.num_periods": "",
        "num_threads": "",
        "differences.num_vectors": "",
        "curvature_train": "",
    },
    timings=("product*", "models", "model_repeats", "step*", "time", "memory-*", "low-memory-*"),
)
compute, judge, draw = of_parts(
    {"products": [products], "models": [models], "steps": [steps], "differences": [differences]}
)
