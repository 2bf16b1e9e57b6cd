"""One method of a public library, measured in a process of its own.

python worker.py network.pt result.pt '{"library": "dattri", "method": "cg", ...}'

Run as a file, with any Python that has torch and the method's library: nothing of this repository is imported but
files beside this one, and for library "curvlab". Scores have our sign, -∇l(test)ᵀ (G + damping I)⁻¹ ∇l(point):
a library that gives the opposite sign is negated.
"""

# mypy: disable-error-code="import-not-found"
# The peers are installed elsewhere.

from __future__ import annotations

import importlib
import importlib.metadata
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING or __package__:
    from experiments.benchmarks.attribution.libraries.mended import bergson_scores, mended, token_margins
    from experiments.benchmarks.attribution.libraries.networks import build, reached
else:  # run as a file, beside which the others lie
    from mended import bergson_scores, mended, token_margins
    from networks import build, reached

Options = dict[str, Any]


class TrainedNetwork:
    """The trained network, see `networks.build`, and its data.

    Inputs: (N, D) of an MLP, (N, C, H, W) of a ConvNet, tokens (N, T) of a language model; targets (N,) or (N, T).
    """

    def __init__(self, stored: dict[str, Any]) -> None:
        self.model = build(stored)
        self.train: tuple[Tensor, Tensor] = (stored["train_inputs"], stored["train_targets"])
        self.test: tuple[Tensor, Tensor] = (stored["test_inputs"], stored["test_targets"])
        self.damping = float(stored["damping"])
        self.loss = nn.CrossEntropyLoss()  # mean over examples, of a language model over their tokens, too
        self.ensemble: list[list[Tensor]] = stored.get("ensemble", [])  # parameters of other networks, for TRAK

    def states(self) -> list[dict[str, Tensor]]:
        """Return the state of each network of the ensemble, or that of the one network."""
        names = [name for name, _ in self.model.named_parameters()]
        state = self.model.state_dict()
        own = [state | dict(zip(names, parameters, strict=True)) for parameters in self.ensemble]
        return own or [state]

    @property
    def num_tokens(self) -> int:
        """T, the targets of an example: 1 but of a language model."""
        return self.train[1][0].numel()

    def loader(self, which: str, batch_size: int) -> DataLoader:
        """Return batches in the stored order."""
        return DataLoader(TensorDataset(*getattr(self, which)), batch_size=batch_size, shuffle=False)

    def test_gradients(self) -> Tensor:
        """Return (P, M)."""
        return torch.stack([self._gradient(x, y) for x, y in zip(*self.test, strict=True)], dim=1)

    def scores_along(self, directions: Tensor) -> Tensor:
        """Return minus the derivative of every training loss along (P, M), (M, N), with per-example gradients."""
        from torch.func import functional_call, grad, vmap

        names = [name for name, _ in self.model.named_parameters()]

        def loss(parameters: tuple[Tensor, ...], x: Tensor, y: Tensor) -> Tensor:
            outputs = functional_call(self.model, dict(zip(names, parameters, strict=True)), (x[None],))
            return self.loss(outputs, y[None])

        parameters = tuple(parameter.detach() for parameter in self.model.parameters())
        rows = []
        for x, y in self.loader("train", 200):
            gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
            flat = torch.cat([g.reshape(len(x), -1) for g in gradients], dim=1)
            rows.append(flat @ directions)
        return -torch.cat(rows).T

    def _gradient(self, x: Tensor, y: Tensor) -> Tensor:
        gradients = torch.autograd.grad(self.loss(self.model(x[None]), y[None]), list(self.model.parameters()))
        return torch.cat([g.reshape(-1) for g in gradients])


def curvlab(network: TrainedNetwork, options: Options) -> tuple[Tensor, str]:
    """Ours: the default solver, or a residual asked for."""
    from curvlab.influence import influence

    data, rtol = (network.train, network.test), options.get("rtol")
    found = influence(network.model, network.loss, *data, damping=network.damping, rtol=rtol)
    residual = float(found.solution.residual.max())
    return found.scores, f"{found.solution.num_matvecs} products, largest residual {residual:.1e}"


def gradients(network: TrainedNetwork, options: Options) -> tuple[Tensor, str]:
    """Inner products of gradients: no curvature at all."""
    return network.scores_along(network.test_gradients()), ""


def curvlinops(network: TrainedNetwork, options: Options) -> tuple[Tensor, str]:
    """Conjugate gradients on its Gauss-Newton operator; the scores by per-example gradients, as it has none."""
    from curvlinops import CGInverseLinearOperator, GGNLinearOperator
    from curvlinops.examples import IdentityLinearOperator

    parameters = list(network.model.parameters())
    data = list(network.loader("train", 512))
    matrix = GGNLinearOperator(network.model, network.loss, parameters, data, check_deterministic=False)
    shapes = [tuple(p.shape) for p in parameters]
    identity = IdentityLinearOperator(shapes, parameters[0].device, parameters[0].dtype)
    damped = matrix + network.damping * identity
    inverse = CGInverseLinearOperator(damped, **options.get("options", {}))
    return network.scores_along(inverse @ network.test_gradients()), ""


def pydvl(network: TrainedNetwork, options: Options) -> tuple[Tensor, str]:
    """Its CG, LiSSA and EK-FAC: "GAUSS_NEWTON" there means the empirical Fisher matrix."""
    from pydvl.influence.torch import CgInfluence, EkfacInfluence, LissaInfluence

    method, options = options["method"], dict(options.get("options", {}))
    if "second_order_mode" in options:
        from pydvl.influence.torch.util import SecondOrderMode

        options["second_order_mode"] = SecondOrderMode[options["second_order_mode"]]
    if method == "ekfac":
        fitted = EkfacInfluence(network.model, update_diagonal=True, hessian_regularization=network.damping)
    else:
        kind = {"cg": CgInfluence, "lissa": LissaInfluence}[method]
        fitted = kind(network.model, network.loss, regularization=network.damping, **options)
    fitted = fitted.fit(network.loader("train", 512))
    factors = fitted.influence_factors(*network.test)
    # Its per-example gradients of all training data at once would take 6 GiB and more.
    batches = network.loader("train", 200)
    return -torch.cat([fitted.influences_from_factors(factors, x, y).detach() for x, y in batches], dim=1), ""


def dattri(network: TrainedNetwork, options: Options) -> tuple[Tensor, str]:
    """Its CG (on the Hessian) and EK-FAC."""
    from dattri.algorithm.influence_function import IFAttributorCG, IFAttributorEKFAC
    from dattri.task import AttributionTask

    def loss(parameters: Any, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, y = pair
        single = x.ndim < network.train[0].ndim
        x, y = (x[None], y.reshape(1, *network.train[1].shape[1:])) if single else (x, y)
        return network.loss(torch.func.functional_call(network.model, parameters, (x,)), y)

    task = AttributionTask(loss_func=loss, model=network.model, checkpoints=network.model.state_dict())
    if options["method"] == "ekfac":
        made = mended(IFAttributorEKFAC) if options.get("mended") else IFAttributorEKFAC
        attributor = made(task=task, damping=network.damping)
    else:
        attributor = IFAttributorCG(task=task, regularization=network.damping, **options.get("options", {}))
    try:
        attributor.cache(network.loader("train", options.get("batch_size", 500)))  # for the matrix
    except UnboundLocalError as error:  # in 0.3.0, which sets a_prev where inputs are (N, D), and only there
        raise NotImplementedError(f"its EK-FAC takes no sequences, (N, D) alone ({error})") from error
    with torch.no_grad():
        scores = attributor.attribute(network.loader("train", 500), network.loader("test", 25))
    return -scores.detach().T, reached(network.model, nn.Linear) if options["method"] == "ekfac" else ""


def kronfluence(network: TrainedNetwork, options: Options) -> tuple[Tensor, str]:
    """Its EK-FAC and K-FAC of Linear and Conv2d layers.

    Of a language model the loss is the sum over tokens, as in its examples: T times ours, and the matrix with
    per-sequence gradients of sampled tokens T times the Gauss-Newton matrix of the mean, so the damping is, too.
    """
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Classification(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            x, y = batch
            logits = model(x)
            if sample:
                by_token = logits.detach().movedim(1, -1).flatten(0, -2)
                y = torch.multinomial(by_token.softmax(-1), 1).reshape(y.shape)
            return nn.functional.cross_entropy(logits, y, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    torch.manual_seed(0)
    train, test = TensorDataset(*network.train), TensorDataset(*network.test)
    sizes = {"per_device_query_batch_size": 25, "per_device_train_batch_size": 500}
    damping = {} if options.get("own_damping") else {"damping_factor": network.damping * network.num_tokens}
    task, remark = Classification(), reached(network.model, nn.Linear, nn.Conv2d)
    prepared = prepare_model(network.model, task)
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer("peers", prepared, task, cpu=True, disable_tqdm=True, output_dir=folder)
        factors = FactorArguments(strategy=options["method"])
        analyzer.fit_all_factors("factors", train, per_device_batch_size=500, factor_args=factors)
        arguments = {"score_args": ScoreArguments(**damping)}
        analyzer.compute_pairwise_scores("scores", "factors", test, train, **sizes, **arguments)
        scores = analyzer.load_pairwise_scores("scores")["all_modules"]
    return -scores / network.num_tokens, remark


def traker(network: TrainedNetwork, options: Options) -> tuple[Tensor, str]:
    """TRAK, with its projector for CPUs, or none; higher scores of its own are more helpful."""
    from trak import TRAKer
    from trak.projectors import BasicProjector, NoOpProjector

    size, asked = sum(parameter.numel() for parameter in network.model.parameters()), options["proj_dim"]
    if asked is None:
        projector = NoOpProjector(size, size, 0, "rademacher", "cpu")
    else:
        projector = BasicProjector(grad_dim=size, proj_dim=asked, seed=0, proj_type="rademacher", device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        task: Any = token_margins() if network.num_tokens > 1 else "image_classification"
        sizes = {"train_set_size": len(network.train[0]), "proj_dim": asked or size}
        own = {"lambda_reg": options.get("lambda_reg", 0.0), "use_half_precision": False}  # 0 is its default
        where = {"save_dir": folder, "device": "cpu", "logging_level": 40}
        scorer = TRAKer(model=network.model, task=task, projector=projector, **sizes, **own, **where)
        states = network.states()
        for place, state in enumerate(states):
            scorer.load_checkpoint(state, model_id=place)
            for batch in network.loader("train", 200):
                scorer.featurize(batch=batch, num_samples=len(batch[0]))
        scorer.finalize_features()
        for place, state in enumerate(states):
            scorer.start_scoring_checkpoint("test", state, model_id=place, num_targets=len(network.test[0]))
            for batch in network.loader("test", 200):
                scorer.score(batch=batch, num_samples=len(batch[0]))
        scores = torch.from_numpy(scorer.finalize_scores("test").copy()).float()  # (N, M)
    return -scores.T, f"{len(states)} networks"


def bergson(network: TrainedNetwork, options: Options) -> tuple[Tensor, str]:
    """Its EK-FAC of the linear layers of a language model, without the head, and its conjugate gradients."""
    from transformers.pytorch_utils import Conv1D

    if network.num_tokens == 1:
        raise NotImplementedError("it takes causal language models of transformers alone")
    model: Any = network.model.model
    damping, num_steps = None if options.get("own_damping") else network.damping, int(options.get("num_steps", 0))
    scores = bergson_scores(model, network.train, network.test, damping=damping, num_steps=num_steps)
    every = sum(parameter.numel() for parameter in network.model.parameters())
    kind = nn.Linear if model.config.model_type == "opt" else Conv1D
    layers = [module for module in model.base_model.modules() if isinstance(module, kind)]
    inside = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    return -scores.T, f"of the {kind.__name__} layers, the head left out: {inside} of {every} parameters"


Method = Callable[[TrainedNetwork, Options], tuple[Tensor, str]]
EVERY: tuple[Any, ...] = (curvlab, gradients, curvlinops, pydvl, dattri, kronfluence, traker, bergson)
METHODS: dict[str, Method] = {method.__name__: method for method in EVERY}
# Imported before the clock starts.
MODULES = {"curvlab": "curvlab.influence", "gradients": "torch.func", "curvlinops": "curvlinops.examples"}
MODULES |= {"pydvl": "pydvl.influence.torch", "dattri": "dattri.algorithm.influence_function"}
MODULES |= {"kronfluence": "kronfluence.analyzer", "traker": "trak", "bergson": "bergson.hessians.pipeline"}
DISTRIBUTIONS = {"curvlinops": "curvlinops-for-pytorch", "gradients": "torch"}


def peak_bytes() -> int:
    """Return the largest memory of this process so far, Python and torch included."""
    try:  # not ru_maxrss, which a process inherits from the one that started it
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measured(method: Method, network: TrainedNetwork, options: Options) -> tuple[Tensor, str, dict[str, float]]:
    """Return scores, a remark and seconds."""
    start, cpu_start = time.perf_counter(), time.process_time()
    scores, remark = method(network, options)
    cost = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu_start}
    return scores, remark, cost


def main() -> None:
    """Read the network, run one method, write its scores and what they cost."""
    source, target, described = sys.argv[1:4]
    options = json.loads(described)
    torch.set_num_threads(int(options.get("num_threads", 1)))
    network = TrainedNetwork(torch.load(source, weights_only=True))
    library = options["library"]
    version = importlib.metadata.version(DISTRIBUTIONS.get(library, library))
    importlib.import_module(MODULES[library])
    torch.func.vmap(torch.func.grad(torch.sin))(torch.zeros(1))  # what PyTorch loads for it is no library's
    scores, remark, cost = measured(METHODS[library], network, options)
    # What is loaded for a first call is no method's.
    if cost["cpu_seconds"] < float(options.get("repeat_below", 0)):
        cost = measured(METHODS[library], network, options)[2]
    cost["peak_bytes"] = peak_bytes()
    # Need not be atomic: whoever started this process reads the file only after it has ended with status 0.
    torch.save({"scores": scores.float().clone(), "remark": remark, "version": version, **cost}, target)


if __name__ == "__main__":
    main()
