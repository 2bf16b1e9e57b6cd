"""The Fisher preconditioner: bounds on ‖∇²f - F‖, and steps to ε against K(ε) (Semenov 2025).

make rank1-fisher PRESET=smoke|embedded|laptop|paper ARGS="num_seeds=5"

Bounds: dense ∇²f and F of small networks, random and trained, with L measured where they stand (the largest
spectral norm of any output's Hessian, example by example), which is the hardest test. The lemma on ‖∇²f - F‖
squares the norm on one side only, which cannot hold for every scale of f; the softmax bound σ <= 2 f lacks L.

Rates: perceptrons, whose L and M are known for all parameters, by FisherNewton with the α_k rules of the slides;
those with softplus are convex, as the lemmas ask, with tanh they are not. For softmax also the rule as printed,
without L: on the parabola, convex with L = 20, it cycles for ever, and the rule with L arrives. R, which the
slides leave undefined, is the largest (f - f*) / ‖∇f‖ on the path, the least for which the lemma's proof works.

Everything is computed for mean losses: under f -> c f with M, σ, ε times c no step changes, and no bound.
`squared` in the table is in the slides' scale, ½ Σ r² and Σ -log p (printed without its -log).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional

from curvlab import runs
from curvlab.models import build_model
from curvlab.reporting import save_claims
from curvlab.runs import Run
from curvlab.training import train
from experiments.rank1.fisher_claims import judge_claims
from experiments.rank1.fisher_models import FisherTask, gap, parabola_task, perceptron_task
from experiments.rank1.fisher_plot import draw
from experiments.rank1.fisher_rates import rate_rows
from experiments.rank1.problems import network


@runs.main("rank1/fisher_preconditioner")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, judge, draw."""
    with runs.start(cfg, paper="rank1", item="fisher", title="The Fisher preconditioner") as run:
        bounds = pd.DataFrame(bound_rows(run, cfg))
        curves, rates = rate_rows(run, cfg)
        run.save_table(pd.DataFrame(curves))
        run.save_table(bounds, "bounds.csv")
        run.save_table(pd.DataFrame(rates), "rates.csv")
        run.save_table(summary(bounds), "summary.csv")
        save_claims(run.folder, judge_claims(bounds, pd.DataFrame(rates)))
        for name, figure in draw(pd.DataFrame(curves), bounds, pd.DataFrame(rates)).items():
            run.save_figure(figure, name)
        run.note(
            scale={
                "models": {"ours": list(bounds.model.unique()), "paper": "any, outputs L-smooth"},
                "examples": {"ours": [cfg.regression.num_train, cfg.images.num_train], "paper": "S"},
                "seeds": {"ours": cfg.num_seeds, "paper": "none"},
                "steps at most": {"ours": cfg.max_steps, "paper": "K(ε)"},
            },
            seeds=list(range(cfg.num_seeds)),
        )


def bound_rows(run: Run, cfg: DictConfig) -> list[dict[str, Any]]:
    """Return one row a (model, state, seed): the gap and the bounds on it."""
    data = {name: instantiate(cfg[name]) for name in ("regression", "images")}
    for splits in data.values():
        run.record_data(splits.name, splits.checksum)
    pairs = {
        "least squares": data["regression"].train.tensors,
        "softmax": _pooled(data["images"].train.tensors, cfg.pooling),
    }
    rows = []
    for kind, (inputs, targets) in run.progress(list(pairs.items()), "bounds"):
        for seed in range(cfg.num_seeds):
            for state in ("random", "trained"):
                config = {
                    "kind": kind,
                    "state": state,
                    "number": seed,
                    "hidden_sizes": list(cfg.model.hidden_sizes),
                    "num_epochs": cfg.num_epochs,
                    "data": data["regression" if kind == "least squares" else "images"].checksum,
                    "pooling": cfg.pooling,
                    "version": 1,
                }
                compute = partial(_network_gap, run, (kind, state, seed), (inputs, targets))
                rows.append({"model": f"MLP, {kind}", **run.unit("rank1/fisher-bounds", config, compute)})
            for scale in cfg.scales:
                task = perceptron_task(
                    kind,
                    scale=scale,
                    activation="tanh",
                    noise=0.5,
                    generator=run.generator("perceptron", kind, seed),
                )
                for parameter in task.model.parameters():
                    parameter.data *= 3
                rows.append(_row(f"perceptron × {scale:g}, {kind}", (kind, "random", seed), gap(task), task))
        task = parabola_task(kind, curvature=cfg.parabola)
        rows.append(_row(f"parabola × {cfg.parabola:g}, {kind}", (kind, "constructed", 0), gap(task), task))
        task = perceptron_task(
            kind, scale=1.0, activation="identity", noise=0.5, generator=run.generator("linear", kind)
        )
        rows.append(_row(f"linear, {kind}", (kind, "random", 0), gap(task), task))
    return rows


def _network_gap(run: Run, what: tuple[str, str, int], data: tuple[Tensor, Tensor]) -> dict[str, Any]:
    (kind, state, seed), cfg, (inputs, targets) = what, run.cfg, data
    loss: nn.Module = nn.MSELoss() if kind == "least squares" else nn.CrossEntropyLoss()
    num_outputs = 1 if kind == "least squares" else int(targets.max()) + 1
    model = build_model(
        partial(instantiate, cfg.model),
        input_shape=inputs.shape[1:],
        num_outputs=num_outputs,
        generator=run.generator("network", kind, seed),
    )
    if state == "trained":
        train(
            model,
            loss,
            (inputs, targets),
            num_epochs=cfg.num_epochs,
            batch_size=32,
            lr=0.01,
            optimizer="adam",
            generator=run.generator("training", kind, seed),
        )
    model = model.double()
    pair = (inputs.double(), targets.double() if targets.is_floating_point() else targets)
    problem = network(model, pair, loss, name=kind)
    task = FisherTask(problem, model, loss, pair, smoothness=None)
    return _row("", what, gap(task), task) | {"model": f"MLP, {kind}"}


def _row(model: str, what: tuple[str, str, int], found: dict[str, float], task: FisherTask) -> dict[str, Any]:
    """Return the gap beside the bounds; `squared` and `lemma` in the slides' scale."""
    kind, state, seed = what
    half = 0.5 if kind == "least squares" else 1.0
    total = half * len(task.data[0])  # slides' scale over that of the mean
    largest, ratio = found["smoothness"], 2 * found["loss"] ** (0.5 if kind == "least squares" else 1.0)
    return {
        "model": model,
        "kind": kind,
        "state": state,
        "seed": seed,
        "n": task.problem.size,
        "S": len(task.data[0]),
        **found,
        "one_norm_bound": largest * found["one_norm"],
        "loss_bound": largest * ratio,
        "loss_bound_without_L": ratio,
        "squared": (total * found["gap"]) ** 2,
        "lemma": total * largest * found["one_norm"],
    }


def _pooled(data: tuple[Tensor, Tensor], size: int) -> tuple[Tensor, Tensor]:
    """Return images averaged to (size, size) and flattened: few parameters, so that ∇²f can be dense."""
    images, labels = data
    return functional.adaptive_avg_pool2d(images, size).flatten(1), labels


def summary(bounds: pd.DataFrame) -> pd.DataFrame:
    """Return one row a (model, state): medians over seeds of the gap and its share of each bound."""
    shares = bounds.assign(
        gap_by_one_norm_bound=bounds.gap / bounds.one_norm_bound,
        gap_by_loss_bound=bounds.gap / bounds.loss_bound,
        gap_by_loss_bound_without_L=bounds.gap / bounds.loss_bound_without_L,
        squared_by_lemma=bounds.squared / bounds.lemma,
    )
    columns = ["n", "S", "loss", "gap", "smoothness", *[name for name in shares if "_by_" in str(name)]]
    return shares.groupby(["model", "state"], sort=False)[columns].median().reset_index()


if __name__ == "__main__":
    main()
