"""Train by SGD, then let several optimizers go on from that very state: what Figs. 4, 5 and 6 share.

Everything up to the split is one unit of work for each seed, and so is each branch: targets with equal settings
share them. The LLC at the split is that of the state which all branches leave.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from curvlab.runs import Run
from experiments.ngd.trajectories import Problem, last_state, load_problem, trajectory

BEFORE = "before"  # the branch that all others leave
SHARED = ("before", "after", "branches", "llc")  # settings that a panel may change


def split_table(run: Run, cfg: DictConfig) -> pd.DataFrame:
    """Compute all panels; return one row an epoch, with the LLC where it was estimated.

    Columns: panel, branch ("before" for what comes before the split), seed, epoch (counted from the first), lr,
    what `trajectory` gives, and step_norm = lr * update_norm, the mean over batches of ‖Δw‖.

    Args:
        run: seeds, store, device.
        cfg: `panels`, each with data, model and what it changes of the nodes `before` (optimizer, training,
            llc_epochs), `after` (training, llc_epochs: counted from the split), `branches` (optimizers by name;
            null: left out) and `llc`; `seeds`. The LLC is estimated at `llc_epochs` and at both ends.
    """
    parts = []
    for name in cfg.panels:
        settings = panel_settings(cfg, str(name))
        problem = load_problem(run, settings.data, settings.model, str(name))
        for seed in cfg.seeds:
            parts += [part.assign(panel=str(name), seed=seed) for part in _branches(run, problem, settings, seed)]
    table = pd.concat(parts, ignore_index=True)
    table["step_norm"] = table.lr * table.update_norm
    table["valid"] = table.valid.eq(True)  # nan where there is no estimate
    first = ["panel", "branch", "seed", "epoch", "lr", "train_loss", "validation_loss", "update_norm", "step_norm"]
    return table[first + [column for column in table if column not in first]]


def panel_settings(cfg: DictConfig, panel: str) -> DictConfig:
    """Return the shared settings with those that the panel changes; branches that it sets to null are gone."""
    shared = OmegaConf.create({name: OmegaConf.to_container(cfg[name], resolve=True) for name in SHARED})
    settings = OmegaConf.merge(shared, cfg.panels[panel])
    settings.branches = {name: node for name, node in settings.branches.items() if node is not None}
    return settings  # type: ignore[return-value]  # a mapping stays one


def _branches(run: Run, problem: Problem, settings: DictConfig, seed: int) -> Iterable[pd.DataFrame]:
    before, after = (
        OmegaConf.create({"llc": settings.llc, "trace": None, "training": settings[phase].training})
        for phase in ("before", "after")
    )
    optimizer = settings.before.optimizer
    rows = trajectory(run, problem, optimizer, before, seed, llc_epochs=_llc_epochs(settings.before))
    yield rows.assign(branch=BEFORE, lr=optimizer.lr)
    start = last_state(run, problem, optimizer, before, seed)
    for name, node in settings.branches.items():
        rows = trajectory(run, problem, node, after, seed, start=start, llc_epochs=_llc_epochs(settings.after))
        yield rows.assign(branch=str(name), lr=node.lr)


def _llc_epochs(phase: DictConfig) -> set[int]:
    return {*phase.llc_epochs, phase.training.num_epochs}


def scale(cfg: DictConfig, *, data: str, learning_rates: str) -> dict[str, Any]:
    """Return what was reduced or changed, ours beside the paper's (its data and learning rates are given)."""
    panels = {str(name): panel_settings(cfg, str(name)) for name in cfg.panels}
    epochs = [
        f"{name}: {own.before.training.num_epochs} + {own.after.training.num_epochs}"
        for name, own in panels.items()
    ]
    rates = [
        f"{name}: before {own.before.optimizer.lr:g}, "
        + ", ".join(f"{branch} {node.lr:g}" for branch, node in own.branches.items())
        for name, own in panels.items()
    ]
    data_sets = [f"{name}: {own.data._target_.rpartition('load_')[2]}" for name, own in panels.items()]
    return {
        "models": {"ours": ", ".join(panels), "paper": "ffnn-256-256"},
        "data": {"ours": ", ".join(data_sets), "paper": data},
        "seeds": {"ours": len(cfg.seeds), "paper": "not stated"},
        "epochs before and after the split": {"ours": ", ".join(epochs), "paper": "not stated"},
        "learning rates": {"ours": "; ".join(rates), "paper": learning_rates},
        "factor of the learning rates": {"ours": f"{cfg.lr_factor} (first model)", "paper": 1},
        "alpha": {"ours": 0.1, "paper": "not stated for this figure"},
        "reading of NGD": {
            "ours": "claimed: Kaldi's, output rescaled to the gradient's norm; Eqs. 6 and 7 literally: exact-ngd",
            "paper": "Eqs. 6 and 7, no code",
        },
    }
