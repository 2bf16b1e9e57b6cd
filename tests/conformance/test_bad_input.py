"""Bad input ends in an error of ours that names the argument and says what to change."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from curvlab.curvature import (
    FisherOperator,
    GaussNewtonOperator,
    HessianOperator,
    exact_traces,
    importance_probabilities,
    sampled_traces,
)
from curvlab.influence import (
    ProximalSGD,
    Retraining,
    confident_learning_scores,
    corrupt_labels,
    cosines,
    detection_curve,
    directional_derivatives,
    ensemble_measurements,
    influence,
    lds,
    linear_datamodelling_score,
    load_bank,
    loss_response,
    margins,
    median_rms,
    proximal_bregman_response,
    removal_weights,
    self_influence,
    similarities,
    unrolled_response,
)
from curvlab.influence.retraining import LeftOut
from curvlab.influence.tf_idf import damped_inverse_product
from curvlab.linalg import DenseOperator, identity
from curvlab.optim import NGD, ExactNGD, Ginger
from curvlab.sampling import RMSProp, bayesian_influence, choose_sgld_settings, estimate_llc, split_rhat
from curvlab.solvers import ConjugateGradient, TrainingFilter
from curvlab.spectrum import hutchinson_trace, top_eigenvalues
from curvlab.training import RunLength, curvature_step, evaluate, train
from tests.conformance import calls
from tests.conformance.calls import BESIDE, CALLS, OF_OPERATORS
from tests.refusals import refuses

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(12, 4, generator=GENERATOR), torch.arange(12) % 3
DATA, TEST, LOSS = (X, Y), (X[:3], Y[:3]), nn.CrossEntropyLoss()
MODEL = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).eval()
OP = GaussNewtonOperator(MODEL, LOSS, DATA)
DAMPED, SIDE = OP + 0.1 * identity, torch.ones(OP.shape[0])
INF, NAN = float("inf"), float("nan")


def new() -> nn.Module:
    return copy.deepcopy(MODEL)


def score(model: Any = MODEL, loss: Any = LOSS, data: Any = DATA, test: Any = TEST, **settings: Any) -> Any:
    return influence(model, loss, data, test, **{"damping": 0.1} | settings)


def fit(model: Any = None, loss: Any = LOSS, data: Any = DATA, **settings: Any) -> Any:
    plain = {"num_steps": 2, "batch_size": 4, "lr": 0.1, "generator": 0, "progress": False}
    return train(new() if model is None else model, loss, data, **plain | settings)


def llc(model: Any = MODEL, loss: Any = LOSS, data: Any = DATA, **settings: Any) -> Any:
    plain = {"num_chains": 2, "num_draws": 2, "num_burnin_steps": 2, "batch_size": 4, "step_size": 1e-4}
    return estimate_llc(model, loss, data, **plain | {"generator": 0, "progress": False} | settings)


def unrolled(run: Any, **settings: Any) -> Any:
    return unrolled_response(MODEL, LOSS, DATA, TEST, run=run, **settings)


def choose(**settings: Any) -> Any:
    plain = {"batch_size": 4, "num_burnin_steps": 5, "generator": 0}
    return choose_sgld_settings(MODEL, LOSS, DATA, **plain | settings)


def recorded() -> Any:
    return fit(record=True, momentum=0.0)


def left_out(**settings: Any) -> Any:
    return LeftOut(MODEL, LOSS, DATA, [torch.tensor([3])], **{"damping": 0.1} | settings)


def pbrf(**settings: Any) -> Any:
    plain = {"damping": 0.1, "epsilon": 1e-3, "optimizer": ProximalSGD(0.1, 4, 3)}
    return proximal_bregman_response(MODEL, LOSS, DATA, [0], **plain | settings)


def bayesian(**settings: Any) -> Any:
    plain = {"num_chains": 2, "num_draws": 2, "num_burnin_steps": 2, "batch_size": 4, "step_size": 1e-4}
    return bayesian_influence(MODEL, LOSS, DATA, TEST, **plain | {"generator": 0} | settings)


def changed_in_place(*, targets: bool) -> Any:
    """Ignored targets change the number of predictions, which an operator has counted."""
    x, y = X.clone(), Y.clone()
    operator = GaussNewtonOperator(MODEL, LOSS, (x, y))
    operator @ SIDE
    _ = y[:4].fill_(-100) if targets else x.add_(1)
    return operator @ SIDE


def exhausted() -> Any:
    yield from [(X, Y)]


def closed() -> Any:
    class Closed:
        def __iter__(self) -> Any:
            raise ValueError("I/O operation on closed file")

    return Closed()


class Record(nn.Module):
    def forward(self, x: Any) -> Any:
        return {"outputs": x}


class WithoutGradient(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)

    @torch.no_grad()
    def forward(self, x: Any) -> Any:
        return super().forward(x)


def penalised(outputs: Any, targets: Any) -> Any:
    return LOSS(outputs, targets) + MODEL[0].weight.square().sum()


def signed_labels() -> Any:
    return nn.Linear(4, 1), nn.BCEWithLogitsLoss(), (X, X[:, :1].sign())


mixed = partial(nn.Sequential, nn.Linear(4, 3), nn.Linear(3, 3).double())
ginger = partial(Ginger, list(MODEL.parameters()), rank=2, decay=0.9)

NUMERIC = CALLS | OF_OPERATORS | BESIDE
CASES: list[tuple[Callable[[], Any], str]] = [
    # ------------------------------------------------------------------------------- generators
    (lambda: score(generator=0.5), "a torch.Generator or a whole number as seed, got float"),
    (lambda: score(generator=np.random.default_rng(0)), "got numpy.random"),
    (lambda: top_eigenvalues(OP, 1, generator=True), "got bool"),
    (lambda: top_eigenvalues(OP, 1, generator=2**70), "a seed has 64 bits"),
    (lambda: OP.sample(4, "0"), "a whole number as seed, got str"),
    (lambda: FisherOperator(MODEL, LOSS, DATA, kind="monte_carlo"), "pass generator="),
    # ------------------------------------------------------------------------------- models, losses
    (lambda: score(lambda x: x), "the model is a function: pass an nn.Module"),
    (lambda: fit(nn.Linear), "the model is a class, Linear"),
    (lambda: llc(0), "the model is a int: pass an nn.Module"),
    (lambda: score(new().to("meta")), "on the meta device.*load_state_dict"),
    (lambda: fit(new().to("meta")), "on the meta device"),
    (lambda: llc(new().to("meta")), "on the meta device"),
    (lambda: score(mixed()), "must share one dtype.*float32.*float64"),
    (lambda: score(new().requires_grad_(False)), "no parameter of the model requires grad"),
    (lambda: fit(mixed()), "mixes dtypes"),
    (lambda: fit(new().requires_grad_(False)), "no parameter that requires gradients"),
    (lambda: score(nn.Sequential(MODEL, Record())), r"the model returns dict.*\.logits.*forward returns"),
    (lambda: score(nn.LSTM(4, 3)), r"the model returns tuple.*\.logits.*forward returns"),
    (lambda: fit(nn.Sequential(new(), Record())), "the model returns dict"),
    (lambda: fit(nn.LSTM(4, 3)), "the model returns tuple"),
    (lambda: score(loss=nn.CrossEntropyLoss), "pass an instance of it, CrossEntropyLoss"),
    (lambda: fit(loss=nn.CrossEntropyLoss), "pass an instance of it, CrossEntropyLoss"),
    (lambda: fit(loss="cross_entropy"), "a loss is a function of .outputs, targets., got str"),
    (lambda: fit(loss=nn.CrossEntropyLoss(reduction="none")), "return one number"),
    # ------------------------------------------------------------------------------- data
    (lambda: score(data=(X[:0], Y[:0])), "^data is empty"),
    (lambda: score(test=[]), "^test is empty"),
    (lambda: score(data=()), "^data is empty"),
    (lambda: score(data=[(X[:0], Y[:0])]), "^data is empty"),
    (lambda: score(data=TensorDataset(X[:0], Y[:0])), "^data is empty"),
    (lambda: score(candidates=(X[:0], Y[:0])), "^candidates is empty"),
    (lambda: fit(data=(X[:0], Y[:0])), "^train_data is empty"),
    (lambda: fit(num_steps=3, validation=(X[:0], Y[:0])), "^validation is empty"),
    (lambda: fit(data=None), "cannot read data from NoneType"),
    (lambda: fit(data=X), "cannot read data from Tensor"),
    (lambda: fit(data="train.csv"), "cannot read data from str"),
    (lambda: fit(data=exhausted()), "one-shot iterator"),
    (lambda: score(data=exhausted()), "one-shot iterator"),
    (lambda: fit(data=(X.numpy(), Y.numpy())), "torch.from_numpy"),
    (lambda: fit(data=(X, X, Y)), "3 tensors.*mapping by the names"),
    (lambda: score(data=TensorDataset(X, X, Y)), "3 tensors.*mapping by the names"),
    (lambda: score(data=Subset([(X[0], None)], [0])), "found .*NoneType.*give every example a target"),
    (lambda: fit(data=DataLoader(Subset([(X[0], 1), (X[0], None)], [0, 1]), 2)), "NoneType.*give every"),
    (lambda: score(data=TensorDataset(X)), r"pair.*\(inputs, targets\)"),
    (lambda: score(data={"inputs": X, "targets": Y}), r"pair.*\(inputs, targets\)"),
    (lambda: fit(data=(X, Y[:5])), r"inputs have \[12\] examples and targets 5"),
    (lambda: score(data=(X.to("meta"), Y)), "the data is on the meta device"),
    (lambda: score(data=(X[:, :2], Y)), r"does not take the inputs, torch.float32 \(1?2?, 2\)|does not take"),
    (lambda: fit(data=(X[:, :2], Y)), "does not take the inputs"),
    (lambda: llc(data=(X[:, :2], Y)), "does not take the inputs"),
    (lambda: fit(data=(X.long(), Y)), "the inputs are torch.int64.*inputs.float()"),
    (lambda: evaluate(MODEL, LOSS, (X.long(), Y)), "the inputs are torch.int64"),
    (lambda: score(data=({"u": X, "v": X}, Y)), "nn.Sequential hands all of.*wrap it in a module"),
    (lambda: fit(data=(X, Y.float())), "needs integer class indices"),
    (lambda: fit(data=(X, Y + 5)), "class indices run from .* but the model has 3 outputs"),
    (lambda: fit(data=(X, Y - 5)), "class indices run from"),
    (lambda: score(data=(X, Y - 1)), "class indices run from -1 to 1"),
    (lambda: evaluate(MODEL, LOSS, (X, Y + 5)), "class indices run from"),
    (lambda: fit(loss=nn.BCEWithLogitsLoss()), "targets must be floating point of the outputs' shape"),
    (lambda: fit(nn.Linear(4, 1), nn.MSELoss(), (X, X[:, 0])), "targets.unsqueeze"),  # else broadcast
    (lambda: fit(data=(X * NAN, Y)), "look for NaN"),
    (lambda: score(test=(X[:3] * NAN, Y[:3])), "contain NaN or infinity"),
    # ------------------------------------------------------------------------------- points, weights
    (lambda: score(points=[5, 1000]), "from 0 to 11, got 1000"),
    (lambda: score(points=[-1]), "from 0 to 11, got -1"),
    (lambda: score(points=[]), "got none"),
    (lambda: score(points=[0.5]), "got torch.float32"),
    (lambda: score(weights=torch.zeros(12)), "all weights are 0"),
    (lambda: score(weights=torch.ones(11)), "one weight for each of 12 examples, got shape"),
    (lambda: llc(weights=torch.ones(11)), "one weight for each of 12 examples, got shape"),
    (lambda: pbrf(weights=torch.ones(11)), "one weight for each of 12 examples, got shape"),
    (lambda: OP.weighted(-torch.ones(12)), "finite and not negative"),
    (lambda: OP.weighted(torch.full((12,), NAN)), "finite and not negative"),
    (lambda: fit(example_weights=[1.0] * 12), "weights are a tensor"),
    # ------------------------------------------------------------------------------- numbers
    (lambda: score(damping=torch.tensor([0.1, 0.2])), r"got Tensor of shape \(2,\)"),
    (lambda: fit(momentum=2.0), "momentum lies from 0 to 1"),
    (lambda: score().top(2.5), "k must be a whole number, got 2.5"),
    (lambda: score().top("3"), "k must be a whole number, got '3'"),
    (lambda: sampled_traces(OP, generator="0"), "a whole number as seed, got str"),
    (lambda: Retraining.as_many_epochs("a"), "share must be one number, got 'a'"),
    (lambda: choose(bias=1.0), "bias lies between 0 and 1, got 1.0"),
    (lambda: damped_inverse_product(SIDE[:2] / 2, INF, SIDE[:2, None]), "damping must be positive and finite"),
    (lambda: RunLength((0.1,), 0.0, NAN), "weight_decay at least 0"),
    # ------------------------------------------------------------------------------- out of range
    (lambda: score(damping=0), "damping must be positive, got 0.*singular"),
    (lambda: OP.sample(0), "batch_size must be at least 1, got 0"),
    (lambda: GaussNewtonOperator(MODEL, LOSS, DATA, columns="parallel") @ SIDE, "auto.*vmap.*loop|loop.*vmap"),
    (lambda: FisherOperator(MODEL, LOSS, DATA, kind="true"), "exact.*monte_carlo.*empirical"),
    (lambda: hutchinson_trace(OP), "say how much work"),
    (lambda: hutchinson_trace(OP, num_matvecs=5, distribution="uniform"), "'rademacher' or 'gaussian'"),
    (lambda: TrainingFilter(1.0, rtol=1.0), "rtol must be between 0 and 1"),
    (lambda: choose(sampler="hmc"), "underdamped., got 'hmc'"),
    (lambda: bayesian(num_draws=1), "num_draws must be at least 2"),
    (lambda: bayesian(step_size=None), "choose_sgld_settings"),
    (lambda: RMSProp(decay=0.9, damping=0.0), "decay lies between 0 and 1 and damping is positive, got 0.9 and 0"),
    # ------------------------------------------------------------------------------- other arguments
    (
        lambda: proximal_bregman_response(MODEL, LOSS, DATA, TEST, damping=0.1, epsilon=0.1, optimizer=None),
        "indices of training examples, got tuple: give other data as candidates",
    ),
    (lambda: fit(keep="foo"), "keep must be 'last' or 'best', got 'foo'"),
    (lambda: score(points=(X, Y)), "indices of training examples, got tuple: give other data as candidates"),
    (lambda: score(run=recorded(), damping=None, retraining="half"), "retraining is a .*Retraining, got 'half'"),
    (lambda: similarities(MODEL, LOSS, DATA, OP, solver="cg"), "solver must be one of curvlab.solvers"),
    (lambda: ConjugateGradient(preconditioner="x").solve(DAMPED, SIDE), "preconditioner is an operator.*got 'x'"),
    (lambda: LeftOut(MODEL, LOSS, DATA, [[3]], damping=0.1), r"a tensor of indices, got \[3\]"),
    (lambda: score(loss=lambda outputs: outputs.sum()), r"called as loss\(outputs, targets\)"),
    (lambda: score(loss=lambda outputs, targets: 1.0), "returns float: return a tensor"),
    (lambda: llc(settings={"step_size": 1.0}, step_size=None), "what choose_sgld_settings"),
    (lambda: unrolled("run"), r"run is what train\(..., record=True\) returned, got str"),
    (lambda: unrolled(fit()), "train with train"),
    (lambda: score(run="run", damping=None), r"run is what train\(...\) returned"),
    (lambda: score(solver=ConjugateGradient), "solver must be one of curvlab.solvers"),
    (lambda: score(solver="cg"), "solver must be one of curvlab.solvers"),
    (lambda: score(measurement="logit"), "measurement is a function of"),
    (lambda: fit(optimizer=Ginger), "functools.partial"),
    (lambda: fit(optimizer=torch.optim.SGD(new().parameters(), 0.1), lr=None), "none of the model's parameters"),
    (lambda: fit(loss=nn.functional.cross_entropy, step=curvature_step), "update_curvature"),
    (lambda: pbrf(optimizer=torch.optim.SGD(MODEL.parameters(), 0.1)), "ProximalSGD"),
    (lambda: OP @ [1.0] * 27, "is a list: pass a tensor"),
    (lambda: ConjugateGradient().solve(MODEL, SIDE), "the matrix is a Sequential: pass an operator"),
    (lambda: ConjugateGradient().solve(torch.eye(27), SIDE), "DenseOperator"),
    (lambda: top_eigenvalues(MODEL, 1), "pass an operator"),
    (lambda: hutchinson_trace(torch.eye(3), num_matvecs=3), "DenseOperator"),
    # ------------------------------------------------------------------------------- tried as an attacker
    *((partial(call, callback=3), "callback is a function of") for call in (llc, fit)),
    (lambda: fit(on_epoch_end="a"), "on_epoch_end is a function of"),
    (lambda: fit(step="a"), "step is a function"),
    (lambda: fit(batches=3, num_steps=None), "batches are tensors of indices, one a step, got 3"),
    (lambda: fit(loss=lambda outputs, targets: None), "the loss returns NoneType: return a tensor"),
    (lambda: fit(validation=[]), "^validation is empty"),
    (lambda: evaluate(MODEL, LOSS, []), "data is empty"),
    (lambda: score(data=[], run=recorded(), damping=None), "data is empty"),
    (lambda: hutchinson_trace(OP, num_matvecs=4, chunk_size=None), "chunk_size must be a whole number"),
    (lambda: choose(batch_size=None), "batch_size must be a whole number"),
    *(
        (
            partial(linear_datamodelling_score, X.T, torch.eye(6, 12) > 0, X[:6], confidence=c),
            "between 0 and 1, got",
        )
        for c in (-1.0, 1.5, NAN)
    ),
    (lambda: score().plot(tests=["a"]), "a number of tests must be a whole number, got 'a'"),
    (
        lambda: score(measurement=lambda outputs, y: (outputs.argmax(1) == y).float()),
        "no derivative by the outputs",
    ),
    (lambda: score(measurement=lambda outputs, y: None), "what measurement returns must be a tensor"),
    (lambda: score(loss=lambda outputs, y: outputs.detach().square().mean()), "no derivative by the outputs"),
    (lambda: score(loss=lambda outputs, y: outputs.square().mean() + 0j), "returns complex numbers"),
    (lambda: score(nn.Linear(4, 3).to(torch.complex64)), "complex parameters"),
    (lambda: score(data=(X.to_sparse(), Y)), "to_dense"),
    (lambda: score(nn.DataParallel(MODEL)), "pass model.module"),
    (lambda: score(torch.jit.script(MODEL)), "pass the module that it was made from"),
    (lambda: changed_in_place(targets=False), "data was changed in place"),
    (lambda: changed_in_place(targets=True), "data was changed in place"),
    (lambda: evaluate(MODEL, nn.CrossEntropyLoss(weight=X[0, :3].abs()), (X, X[:, :3])), "are for class indices"),
    (lambda: score(callback=3), "callback is a function of the state, got 3"),
    (lambda: score(checkpoint=3), "checkpoint is the path of a file, got 3"),
    (lambda: self_influence(MODEL, LOSS, DATA, damping=0.1, solver=3), "solver must be one of curvlab.solvers"),
    (lambda: loss_response(MODEL, LOSS, DATA, SIDE[:3, None], epsilon=0.1), "with 27 rows, got"),
    (lambda: directional_derivatives(MODEL, LOSS, DATA, SIDE[:3, None]), "with 27 rows, got"),
    (lambda: ensemble_measurements(MODEL, LOSS, DATA, "a"), "parameters must be a tensor, .K, P., got str"),
    (lambda: cosines("a"), "products must be a tensor, got str"),
    (lambda: median_rms("a"), "scores must be a tensor, got str"),
    (lambda: margins(X, Y[:3]), "labels must have the shape .N,. with 12 rows"),
    (lambda: confident_learning_scores(X, Y + 9), "classes from 0 to 3, got 11"),
    (lambda: corrupt_labels(X, num_classes=3, fraction=0.5, generator=0), "labels must have the shape"),
    (lambda: detection_curve("a", Y), "scores must be a tensor, got str"),
    (lambda: removal_weights("a", 0.5), "scores must be a tensor"),
    (lambda: linear_datamodelling_score("a", "b", "c"), "scores must be a tensor"),
    (lambda: DenseOperator("a"), "matrix must be a tensor, got str"),
    (lambda: DenseOperator(torch.ones(2, 2).long()), "matrix is torch.int64: pass floating-point"),
    (lambda: DenseOperator(torch.ones(2, 2) + 0j), "matrix is torch.complex64"),
    (lambda: ConjugateGradient().solve(DAMPED, SIDE, x0="a"), "x0 must be a tensor, got str"),
    (lambda: llc(preconditioner="rms"), "preconditioner is RMSProp"),
    (lambda: split_rhat(SIDE), r"draws must have the shape \(chains, draws\)"),
    (lambda: fit(schedule=lambda step, num_steps: "x"), "what schedule returns must be one number, got 'x'"),
    (lambda: fit(callback="a"), "callback is a function of the state, got 'a'"),
    (lambda: RunLength(("a",), 0.0, 0.0), "a learning rate must be one number, got 'a'"),
    (lambda: importance_probabilities("a"), "scores must be a tensor, got str"),
    # ------------------------------------------------------------------------------- tried as a newcomer, again
    *((partial(call, WithoutGradient()), "do not follow from its trainable") for call in (score, llc, fit)),
    (
        lambda: top_eigenvalues(HessianOperator(WithoutGradient(), LOSS, DATA), 1),
        "do not follow from its trainable",
    ),
    (torch.autocast("cpu")(llc), "not for torch.autocast"),
    (lambda: score(loss=penalised), "penalised reads parameters beside the outputs"),
    (lambda: llc(loss=penalised), "penalised reads parameters beside the outputs"),
    (lambda: score(*signed_labels(), test=DATA), "lie between 0 and 1, got -1 to 1"),
    (lambda: fit(schedule=torch.optim.lr_scheduler.StepLR), r"a function of \(step, number of steps\)"),
    *(
        (partial(kind, given, lr=0.1), f"got {got}: pass model.parameters")
        for kind in (partial(Ginger, rank=2, decay=0.9, damping=0.1), NGD, partial(ExactNGD, fisher=OP))
        for given, got in (([], "none"), (MODEL, "Sequential"), (X, "Tensor"))
    ),
    (lambda: exact_traces(GaussNewtonOperator(MODEL, LOSS, [])), "^data is empty"),
    (lambda: load_bank(3), "a bank has a name, or the path of its file, got 3"),
    (lambda: load_bank(__file__), "is no bank"),
    (lambda: lds(X, None), "bank is what load_bank"),
]


@pytest.mark.parametrize(("call", "text"), CASES, ids=[f"{n} {text[:30]}" for n, (_, text) in enumerate(CASES)])
def test_bad_input_is_refused_with_what_to_change(call: Callable[[], Any], text: str) -> None:
    refuses(text, call, error=(ValueError, TypeError, ArithmeticError))


# Numbers at the end of a range that mean something, for every call or for one: no momentum, all memory.
ZERO = {
    "alpha", "average_last", "delta", "floor", "gap", "hessian_lipschitz", "l2", "localization", "momentum",
    "num_burnin_steps", "sigma", "sigma_root", "sigma_slope", "smoothness", "uniform", "warmup_steps",
    "weight_decay",
    "Ginger lr", "Lissa rtol", "NGD lr", "QNG lr", "RMSProp decay", "top_eigenvalues rtol",
}  # fmt: skip
INFINITE = {"clip", "friction", "memory_budget"}
NEGATIVE = {"ProximalBregmanObjective epsilon", "loss_response epsilon", "proximal_bregman_response epsilon"}


@pytest.mark.parametrize("name", NUMERIC)
def test_what_is_no_number_or_out_of_range_is_refused_by_name(name: str) -> None:
    """Of every public call, every argument that is a number: a text, nan, -1, 0, and a fraction or infinity."""
    call = NUMERIC[name]
    for argument, parameter in inspect.signature(call.function).parameters.items():
        kind = str(parameter.annotation)
        if re.search(r"\b(int|float)\b", kind) and not re.search("Generator|Sequence|Callable", kind):
            is_whole = "float" not in kind and "budget" not in argument
            taken = [({0}, ZERO), ({INF}, INFINITE), ({-1}, NEGATIVE)]
            may_be = {number for (number,), names in taken if names & {argument, f"{name} {argument}"}}
            for bad in ("a", NAN, *{-1, 0, 2.5 if is_whole else INF} - may_be):
                refuses(rf"\b{argument}\b", call, error=(ValueError, TypeError), **{argument: bad})


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"output_gaps"}))  # which reads no label
def test_a_label_that_the_model_has_no_output_for_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every public call, in the test examples and in the training set: a gather under vmap takes any index."""
    call, (inputs, targets) = CALLS[name], calls.DATA
    bad = (inputs, targets.where(torch.arange(12) != 10, 7))
    for given in [{"test": bad}] if "test" in call.settings else []:
        refuses(r"class indices run from . to 7, but the model has 2 outputs", call, **given)
    monkeypatch.setattr(calls, "DATA", bad)
    refuses(r"class indices run from . to 7, but the model has 2 outputs", call)


def test_an_error_of_the_data_itself_says_so() -> None:
    with pytest.raises(ValueError, match="closed file") as error:
        score(data=closed())
    assert "raised by the data itself, Closed" in error.value.__notes__[0]


def test_a_class_is_no_measurement() -> None:
    for call in (CALLS["influence"], CALLS["ensemble_measurements"], CALLS["unrolled_response, reverse"]):
        refuses(r"measurement is a function of .*MSELoss", call, error=TypeError, measurement=nn.MSELoss)


def test_seeds_may_be_of_numpy() -> None:
    found = [top_eigenvalues(OP, 1, generator=seed).values for seed in (3, np.int64(3))]
    assert torch.equal(*found)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    for call in (lambda: score().save(tmp_path), lambda: fit(num_steps=5, checkpoint=tmp_path)):
        refuses("is a folder: name a file in it", call, error=IsADirectoryError)
