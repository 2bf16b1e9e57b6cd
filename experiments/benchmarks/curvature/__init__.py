"""Time and memory of Gauss-Newton products, beside the peers' and beside what cannot be saved.

make bench-curvature PRESET=smoke|embedded|laptop|paper ARGS="num_vectors=[1,100]"

One product needs the outputs' derivative along a vector (about two forwards, one of which the gradient needs too)
and one gradient: the floor for one vector is two forwards and one gradient. For K vectors on the same batch the
forward and its activations are shared; the aim is stated per vector (`aim_many`).

All methods take turns, round by round, in one process and on the same random batch and weights; medians count.
Time is processor time on a CPU (with one thread what an idle machine takes, whatever else runs), elapsed time on a
GPU. Vectors lie as each library wants them: ours and curvlinops' as (P, K), ours with contiguous columns.
PyHessian multiplies by the Hessian, one vector at a time; without the package its rows say "not installed".

profile.csv (`profiles=[...]`) times a product with 25 vectors by parts, over one forward and one gradient. A
vector alone takes a forward that carries its tangent (three convolutions a layer: W x, W dx, dW x) and a
backward (two more): 5F beside a floor of 4F, so 1.25 is the least for vectors in turns, each of which computes W
x anew. `columns="vmap"` computes it once, which leaves 4F + F/25 a vector. It is not the default for
convolutions on a CPU: small networks take longer by it, and it holds the tangents' activations of eight vectors.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Time and memory of Gauss-Newton products",
    paper={"num_rounds": "", "num_threads": ""},  # no paper times these
)
