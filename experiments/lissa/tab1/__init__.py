"""Trace, largest eigenvalue and the hyperparameters they recommend (Klochkov & Liu 2024, Table 1).

make lissa-tab1 PRESET=smoke|embedded|laptop|paper ARGS="task=mlp_64_64_digits data=mnist"

For each model: tr(G)/P ± standard error from quadratic forms with a new batch for each normal vector, without a
backward pass (the paper: 1,600 of them), lambda_max from a Gaussian sketch, and step size, batch size and number
of steps by Corollary 1 with C = 2. Beside them what the paper does not have: the trace from products with all the
data, lambda_max by Lanczos with an error bound (the recommendation uses this one), C of condition C.1 measured in
several directions, and the batch size that follows from it.

Which parameters: those that `freeze` leaves (all; for the ResNets without batch norm and biases), in eval() mode.
G is the mean over `curvature_train` training images, or over all predicted tokens of as many sequences; the
paper's N, its number of parameters, is our P. |B| counts images or tokens. `damping` is 5/270 of lambda_max, as
for the paper's ResNet-18, because its lambda = 5 means nothing at another scale. The table's own arithmetic is
checked too: 2 tr / lambda_max for ResNet-50 is 87, the table prints 5.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Trace, largest eigenvalue and the hyperparameters they recommend",
    paper={
        "tasks": ["ResNet-18", "ResNet-50", "OPT-1.3B", "Llama-7B", "Mistral-7B"],
        "table.csv:examples": "sampled from ImageNet, OpenWebText2",
        "forms.num_probes": 1600,
        "sketch.size": 5000,
        "table.csv:damping": 5.0,
        "assumed_constant": 2.0,
    },
)
