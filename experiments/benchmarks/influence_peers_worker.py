"""One method of influence_peers, measured in a process of its own.

python influence_peers_worker.py problem.pt result.pt '{"library": "dattri", "method": "cg", ...}'

Run as a file, with any Python that has torch and the method's library: nothing of this repository is imported but
for library "curvlab". Scores have our sign, -∇l(test)ᵀ (G + damping I)⁻¹ ∇l(point): a library that gives the
opposite sign is negated.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Settings = dict[str, Any]


class Problem:
    """The trained MLP and its data: train (N, D), test (M, D), labels, damping."""

    def __init__(self, stored: dict[str, Any]) -> None:
        sizes = stored["sizes"]
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(sizes):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        self.model = nn.Sequential(*layers[:-1])
        for parameter, value in zip(self.model.parameters(), stored["parameters"], strict=True):
            parameter.data = value.clone()
        self.model.eval()
        self.train: tuple[Tensor, Tensor] = (stored["train_inputs"], stored["train_targets"])
        self.test: tuple[Tensor, Tensor] = (stored["test_inputs"], stored["test_targets"])
        self.damping = float(stored["damping"])
        self.loss = nn.CrossEntropyLoss()

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


def curvlab(problem: Problem, settings: Settings) -> tuple[Tensor, str]:
    """Ours: the default solver, or a residual asked for."""
    from curvlab.influence import influence

    data, rtol = (problem.train, problem.test), settings.get("rtol")
    found = influence(problem.model, problem.loss, *data, damping=problem.damping, rtol=rtol)
    residual = float(found.solution.residual.max())
    return found.scores, f"{found.solution.num_matvecs} products, largest residual {residual:.1e}"


def gradients(problem: Problem, settings: Settings) -> tuple[Tensor, str]:
    """Inner products of gradients: no curvature at all."""
    return problem.scores_along(problem.test_gradients()), ""


def curvlinops(problem: Problem, settings: Settings) -> tuple[Tensor, str]:
    """Conjugate gradients on its Gauss-Newton operator; the scores by per-example gradients, as it has none."""
    from curvlinops import CGInverseLinearOperator, GGNLinearOperator
    from curvlinops.examples import IdentityLinearOperator

    parameters = list(problem.model.parameters())
    data = list(problem.loader("train", 512))
    matrix = GGNLinearOperator(problem.model, problem.loss, parameters, data, check_deterministic=False)
    shapes = [tuple(p.shape) for p in parameters]
    identity = IdentityLinearOperator(shapes, parameters[0].device, parameters[0].dtype)
    damped = matrix + problem.damping * identity
    inverse = CGInverseLinearOperator(damped, **settings.get("options", {}))
    return problem.scores_along(inverse @ problem.test_gradients()), ""


def pydvl(problem: Problem, settings: Settings) -> tuple[Tensor, str]:
    """Its CG, LiSSA and EK-FAC: "GAUSS_NEWTON" there means the empirical Fisher matrix."""
    from pydvl.influence.torch import CgInfluence, EkfacInfluence, LissaInfluence

    method, options = settings["method"], dict(settings.get("options", {}))
    if "second_order_mode" in options:
        from pydvl.influence.torch.util import SecondOrderMode

        options["second_order_mode"] = SecondOrderMode[options["second_order_mode"]]
    if method == "ekfac":
        fitted = EkfacInfluence(problem.model, update_diagonal=True, hessian_regularization=problem.damping)
    else:
        kind = {"cg": CgInfluence, "lissa": LissaInfluence}[method]
        fitted = kind(problem.model, problem.loss, regularization=problem.damping, **options)
    fitted = fitted.fit(problem.loader("train", 512))
    factors = fitted.influence_factors(*problem.test)
    # Its per-example gradients of all training data at once would take 6 GiB and more.
    batches = problem.loader("train", 200)
    return -torch.cat([fitted.influences_from_factors(factors, x, y).detach() for x, y in batches], dim=1), ""


def dattri(problem: Problem, settings: Settings) -> tuple[Tensor, str]:
    """Its CG (on the Hessian) and EK-FAC."""
    from dattri.algorithm.influence_function import IFAttributorCG, IFAttributorEKFAC
    from dattri.task import AttributionTask

    def loss(parameters: Any, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, y = pair
        x, y = (x[None], y[None]) if x.ndim == 1 else (x, y)
        return problem.loss(torch.func.functional_call(problem.model, parameters, (x,)), y.reshape(-1))

    task = AttributionTask(loss_func=loss, model=problem.model, checkpoints=problem.model.state_dict())
    if settings["method"] == "ekfac":
        attributor = IFAttributorEKFAC(task=task, damping=problem.damping)
    else:
        attributor = IFAttributorCG(task=task, regularization=problem.damping, **settings.get("options", {}))
    attributor.cache(problem.loader("train", settings.get("batch_size", 500)))  # for the matrix
    with torch.no_grad():
        scores = attributor.attribute(problem.loader("train", 500), problem.loader("test", 25))
    return -scores.detach().T, ""


def kronfluence(problem: Problem, settings: Settings) -> tuple[Tensor, str]:
    """Its EK-FAC and K-FAC."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Digits(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            x, y = batch
            logits = model(x)
            if sample:
                y = torch.multinomial(logits.detach().softmax(-1), 1).flatten()
            return nn.functional.cross_entropy(logits, y, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    torch.manual_seed(0)
    task = Digits()
    prepared = prepare_model(problem.model, task)
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer("peers", prepared, task, cpu=True, disable_tqdm=True, output_dir=folder)
        analyzer.fit_all_factors(
            "factors",
            TensorDataset(*problem.train),
            per_device_batch_size=500,
            factor_args=FactorArguments(strategy=settings["method"]),
        )
        analyzer.compute_pairwise_scores(
            "scores",
            "factors",
            TensorDataset(*problem.test),
            TensorDataset(*problem.train),
            per_device_query_batch_size=25,
            per_device_train_batch_size=500,
            score_args=ScoreArguments(damping_factor=problem.damping),
        )
        scores = analyzer.load_pairwise_scores("scores")["all_modules"]
    return -scores, ""


METHODS: dict[str, Callable[[Problem, Settings], tuple[Tensor, str]]] = {
    method.__name__: method for method in (curvlab, gradients, curvlinops, pydvl, dattri, kronfluence)
}
# Imported before the clock starts.
MODULES = {
    "curvlab": "curvlab.influence",
    "gradients": "torch.func",
    "curvlinops": "curvlinops.examples",
    "pydvl": "pydvl.influence.torch",
    "dattri": "dattri.algorithm.influence_function",
    "kronfluence": "kronfluence.analyzer",
}
DISTRIBUTIONS = {"curvlinops": "curvlinops-for-pytorch", "gradients": "torch"}


def peak_bytes() -> int:
    """Return the largest memory of this process so far, Python and torch included."""
    try:  # not ru_maxrss, which a process inherits from the one that started it
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Read the problem, run one method, write its scores and what they cost."""
    source, target, described = sys.argv[1:4]
    settings = json.loads(described)
    torch.set_num_threads(int(settings.get("num_threads", 1)))
    problem = Problem(torch.load(source, weights_only=True))
    library = settings["library"]
    version = importlib.metadata.version(DISTRIBUTIONS.get(library, library))
    importlib.import_module(MODULES[library])
    start, cpu_start = time.perf_counter(), time.process_time()
    scores, remark = METHODS[library](problem, settings)
    cost = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu_start}
    cost["peak_bytes"] = peak_bytes()
    # Need not be atomic: whoever started this process reads the file only after it has ended with status 0.
    torch.save({"scores": scores.float().clone(), "remark": remark, "version": version, **cost}, target)


if __name__ == "__main__":
    main()
