"""App. G, compute: error against cost for every system and solver, the printed formulas, and seconds."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig, OmegaConf

from curvlab.lab import Run, task_settings
from experiments.pbrf.appg.formulas import formula_rows
from experiments.pbrf.appg.seconds import s_test_rows, step_rows
from experiments.pbrf.appg.summary import at_equal_cost, ends
from experiments.pbrf.appg.systems import Systems
from experiments.pbrf.appg.trajectories import METHODS, trajectory
from experiments.pbrf.networks import Network, load_network

Row = dict[str, Any]


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return the tables.

    `curves`: a row for each task, curvature, seed, method and recorded iterate: work (products with the whole data
    for each system), and over the systems the median and the worst of error and correlation. `table`: the ends of
    the curves, over seeds. `equal_cost`: what each method has reached at the same cost. `states`: spectra,
    dampings, residuals of the references, LiSSA's scalings. `formulas`, `step_time`, `s_test`: see their modules.
    """
    tables: dict[str, list[Row]] = {
        name: [] for name in ("curves", "states", "solvers", "formulas", "step_time", "s_test")
    }
    seeds: set[int] = set()
    for name, settings in task_settings(cfg).items():
        for seed in settings.seeds:
            network = load_network(run, name, settings, seed)
            for curvature in settings.curvatures:
                for table, rows in _solved(Systems(network, curvature), seed).items():
                    tables[table] += rows
            if settings.s_test.measured:
                tables["s_test"] += s_test_rows(Systems(network, "gauss_newton"))
            if seed == settings.seeds[0]:
                if settings.step_time.measured:
                    tables["step_time"] += step_rows(Systems(network, "gauss_newton"))
                if settings.formulas.measured:
                    tables["formulas"] += _formulas(network)
            seeds.add(seed)
    run.note(seeds=sorted(seeds), threads=torch.get_num_threads())
    found = {name: pd.DataFrame(rows) for name, rows in tables.items()}
    solvers = found.pop("solvers")
    return {
        "table": ends(found["curves"], found["states"], solvers),
        "equal_cost": at_equal_cost(found["curves"], list(cfg.costs)),
        **{name: table for name, table in found.items() if not table.empty},
    }


def _solved(systems: Systems, seed: int) -> dict[str, list[Row]]:
    """Return rows of `states`, `solvers` and `curves` of one network and matrix."""
    network, settings = systems.network, systems.network.settings
    names = {"task": network.label, "curvature": systems.curvature, "seed": seed}
    state = names | {
        "P": systems.matrix.shape[0],
        "N": systems.matrix.num_examples,
        "largest eigenvalue": systems.spectrum["largest"],
        "smallest eigenvalue": systems.spectrum["smallest"],
        "damping asked for": float(settings.damping),
        "damping": systems.damping,
        "reference residual": systems.reference["residual"],
    }
    curves: list[Row] = []
    solvers: list[Row] = []
    for method in settings.methods[systems.curvature]:
        if method == "lissa_auto" and seed not in settings.auto_seeds:
            continue
        found = trajectory(systems, method)
        sizes = {name: found[name] for name in ("batch_size", "num_steps", "scale") if name in found}
        if "tried" in found:
            state[f"{METHODS[method]} scale"] = found["scale"]
            state[f"{METHODS[method]} tried before"] = "; ".join(found["tried"])
        for label, curve in found["curves"].items():
            own = names | {"method": label}
            solvers.append(own | sizes)
            curves += [own | row for row in _curve_rows(curve)]
    return {"states": [state], "solvers": solvers, "curves": curves}


def _curve_rows(curve: Row) -> list[Row]:
    """Return one row for each recorded iterate: over the systems, the median and the worst."""
    return [
        {
            "work": work,
            "error": float(errors.median()),
            "error_worst": float(errors.max()),
            "correlation": float(correlations.median()),
            "correlation_worst": float(correlations.min()),
        }
        for work, errors, correlations in zip(curve["work"], curve["errors"], curve["correlations"], strict=True)
    ]


def _formulas(network: Network) -> list[Row]:
    settings: Any = OmegaConf.to_container(network.settings.formulas)
    key = {"data": network.key["data"], "settings": settings}
    compute = partial(_formula_unit, network, settings)
    about = f"Eq. 48 and 49 on linear regression, inputs of {network.label}"
    found: list[Row] = network.run.unit("pbrf/appg_formulas", key, compute, version=1, about=about)["rows"]
    return found


def _formula_unit(network: Network, settings: Row) -> Row:
    return {"rows": formula_rows(network.train[0], settings)}
