"""Convergence of LiSSA with different batch sizes (Klochkov & Liu 2024, Fig. 2, Sec. 4).

make lissa-fig2 PRESET=smoke|embedded|laptop|paper

LiSSA runs 1,000 steps with twice the recommended batch size, the recommended one (C = 2), and a tenth of it,
averaged over ten runs, which see as much data. Test influences at each step are correlated with those of the exact
solution and between steps. The paper shows one training image (it does not say which); here every number is a mean
over several, and a run that overflows counts as correlation 0.

One panel goes beyond the paper: an overfitted network with small damping, where the recipe with C = 2 diverges and
the one with C measured (`Lissa.auto`) does not. Its exact solutions are computed in double precision.

The iteration is the rescaled form after Eq. 8 of the paper, whose limit does not depend on the step size. The
damping is 5/270 of lambda_max, as for the paper's ResNet-18, where it is not given.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig, OmegaConf

from curvlab import runs
from curvlab.reporting import save_claims
from experiments.lissa.fig2_claims import judge_claims
from experiments.lissa.fig2_convergence import Convergence, TaskResult, compute_task
from experiments.lissa.fig2_plot import draw
from experiments.lissa.fig2_recipe import correlation
from experiments.task import build_task

SHARED = ("damping_ratio", "batch_factors", "num_steps", "reference_rtol", "trace_probes")


@runs.main("lissa/fig2_batch_size")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, judge, draw."""
    with runs.start(cfg, paper="lissa", item="fig2", title="LiSSA with different batch sizes") as run:
        results = [compute_task(run, build_task(run, part), part) for part in _parts(cfg)]
        shown = [result for result in results if result.sizes]
        table = pd.read_csv(run.save_table(pd.concat([convergence_table(result) for result in shown])))
        between = pd.read_csv(
            run.save_table(pd.concat([between_table(result) for result in shown]), "between_steps.csv")
        )
        recipes = pd.read_csv(run.save_table(recipe_table(results), "recipes.csv"))
        run.save_table(summary_table(results), "summary.csv")
        save_claims(run.folder, judge_claims(table, recipes, seed=cfg.seed))
        for name, figure in draw(table, between, recipes).items():
            run.save_figure(figure, name)
        run.note(scale=_scale(results))


def _parts(cfg: DictConfig) -> list[DictConfig]:
    """Return the config of each task: the top level's, then those under `also`."""
    shared = OmegaConf.masked_copy(cfg, list(SHARED))
    further = [OmegaConf.merge(shared, part) for part in (cfg.also or {}).values()]
    return [cfg, *further]  # type: ignore[list-item]  # merged mappings are mappings


def convergence_table(result: TaskResult) -> pd.DataFrame:
    """Return one row a (batch size, point, step): correlation with the exact scores, averaged runs and one run."""
    rows: list[dict[str, Any]] = []
    for size in result.sizes:
        for index, step in enumerate(size.steps):
            averaged = correlation(size.scores[index], result.exact)
            single = correlation(size.single[index], result.exact)
            rows += [
                {
                    "task": result.task.name,
                    "batch_size": size.batch_size,
                    "num_runs": size.num_runs,
                    "point": point,
                    "step": step,
                    "pearson": float(averaged[point]),
                    "pearson_one_run": float(single[point]),
                }
                for point in range(result.exact.shape[1])
            ]
    return pd.DataFrame(rows)


def between_table(result: TaskResult) -> pd.DataFrame:
    """Return one row a (batch size, step, other step): correlation of the scores, mean over points."""
    rows: list[dict[str, Any]] = []
    for size in result.sizes:
        names = {"task": result.task.name, "batch_size": size.batch_size, "num_runs": size.num_runs}
        for i, step in enumerate(size.steps):
            for j in range(i + 1):
                found = float(correlation(size.scores[i], size.scores[j]).mean())
                rows.append(names | {"step": step, "other_step": size.steps[j], "pearson": found})
    return pd.DataFrame(rows)


def recipe_table(results: list[TaskResult]) -> pd.DataFrame:
    """Return one row a (recipe, point, recorded step) of the panel beyond the paper; step -1 is the answer."""
    rows: list[dict[str, Any]] = []
    for result in results:
        if result.recipes is None:
            continue
        for name in ("paper", "auto"):
            found = result.recipes[name]
            steps = [*found["steps"], -1]
            errors = torch.cat([found["errors"], found["final_errors"][None]])
            correlations = torch.cat([found["correlations"], found["final_correlations"][None]])
            rows += [
                {
                    "task": result.task.name,
                    "recipe": name,
                    "batch_size": found["batch_size"],
                    "num_steps": found["num_steps"],
                    "point": point,
                    "step": step,
                    "error": float(error[point]),
                    "pearson": float(pearson[point]),
                    "promised": float(found["promised"][point]),
                    "diverged_at": found["diverged"],
                    "passes": found["passes"],
                }
                for step, error, pearson in zip(steps, errors, correlations, strict=True)
                for point in range(errors.shape[1])
            ]
    return pd.DataFrame(rows)


def summary_table(results: list[TaskResult]) -> pd.DataFrame:
    """Return one row a task: size, spectrum, settings, and what was measured of C."""
    rows = []
    for result in results:
        task, recipes = result.task, result.recipes or {}
        rows.append(
            {
                "task": task.name,
                "P": task.num_parameters,
                "N": task.num_train,
                "train loss": task.train_loss,
                "tr(G)": result.spectrum["trace"],
                "lambda_max": result.spectrum["largest_eigenvalue"],
                "damping": result.damping,
                "step size": result.step_size,
                "batch sizes": " ".join(_label(size) for size in result.sizes),
                "points": result.exact.shape[1],
                "test points": result.exact.shape[0],
                "C measured": recipes.get("constant"),
                "batch size, C = 2": recipes.get("paper", {}).get("batch_size"),
                "batch size, auto": recipes.get("auto", {}).get("batch_size"),
                "message, C = 2": recipes.get("paper", {}).get("message"),
            }
        )
    return pd.DataFrame(rows)


def _label(size: Convergence) -> str:
    return f"{size.batch_size}" + (f"x{size.num_runs}" if size.num_runs > 1 else "")


def _scale(results: list[TaskResult]) -> dict[str, Any]:
    """Return what was reduced or changed, ours beside the paper's."""
    return {
        "models": {"ours": ", ".join(result.task.name for result in results), "paper": "ResNet-18 on ImageNet"},
        "training points": {"ours": [result.exact.shape[1] for result in results], "paper": "one, not said which"},
        "test points": {"ours": [result.exact.shape[0] for result in results], "paper": 500},
        "batch sizes": {
            "ours": [" ".join(_label(size) for size in result.sizes) or "by recipe" for result in results],
            "paper": "200, 100, 10x10",
        },
        "steps": {"ours": [max(result.sizes[0].steps) for result in results if result.sizes], "paper": 1000},
        "damping": {"ours": [round(result.damping, 6) for result in results], "paper": 5.0},
    }


if __name__ == "__main__":
    main()
