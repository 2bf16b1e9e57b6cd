"""`make dashboard`: what W&B shows of a paper's runs, a workspace and a report, built from targets and headlines.

They are written to results/<paper>/dashboard.json, which needs no account; `make dashboard ARGS="entity=TEAM"`
saves them to W&B too, after `wandb login`. Their runs are those of `tracker=wandb`, sent by `make sync`.

Every key that a panel names is logged by every run of its target, of any preset: `execution.numbers_of`,
`curves_of`.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import yaml

from curvlab.files import write_atomically
from curvlab.lab.claims.claim_sheet import FILE_NAME, load_claims
from curvlab.lab.claims.claims import VERDICTS
from curvlab.lab.reporting.findings import HEADLINES
from curvlab.lab.targets.target import ROOT, Target, all_targets, paper_titles

PROJECT = "curvlab"  # as conf/tracker/wandb.yaml
COSTS = ("cost/cpu_seconds", "cost/products", "cost/peak_mib")
PROGRESS = ("progress/seconds", "progress/units")


def main(arguments: Sequence[str] = ()) -> int:
    """Write the dashboards of all papers; with `entity=TEAM` save them to W&B as well."""
    entity = next((word.partition("=")[2] for word in arguments if word.startswith("entity=")), "")
    for paper in paper_titles():
        path = ROOT / "results" / paper / "dashboard.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text(paper).encode())
        print(path.relative_to(ROOT).as_posix())
        if entity:
            for each in (workspace(paper, entity), report(paper, entity)):
                each.save()
                print(f"  {each.url}")
    return 0


def text(paper: str) -> str:
    """Return dashboard.json: the specifications that W&B would be sent."""
    parts = {"workspace": workspace(paper), "report": report(paper)}
    specs = {
        name: part._to_model().spec.model_dump_json(by_alias=True, exclude_none=True)
        for name, part in parts.items()
    }
    lines = (f'"{name}": {json.dumps(json.loads(spec), ensure_ascii=False)}' for name, spec in specs.items())
    return "{" + ",\n".join(lines) + "}\n"


# ------------------------------------------------------------------------------------ what is shown
def panels(target: Target) -> list[Any]:
    """Return the panels of a target: verdicts, headline claims, curves, figure, progress, cost."""
    import wandb_workspaces.reports.v2 as wr

    verdicts = [f"verdicts/{verdict}" for verdict in VERDICTS] if target.claims_file else []
    shown: list[Any] = [wr.BarPlot(title="Verdicts", metrics=verdicts)] if verdicts else []
    for pattern, title in headline_claims(target).items():
        shown.append(
            wr.LinePlot(title=title, metric_regex=f"^claim/{pattern.replace('*', '.*')}/(value|low|high)$")
        )
    for x, y in ((x, y) for _, ys, x, _ in target.curves_parsed() for y in ys):
        shown.append(wr.LinePlot(title=y, x=f"x/{x}", metric_regex=f"^curve/[^/]*/{re.escape(y)}(/.*)?$"))
    shown.append(wr.MediaBrowser(title="Figure", media_keys=["figure"]))
    shown.append(wr.LinePlot(title="Units of work over seconds", x=PROGRESS[0], y=[PROGRESS[1]]))
    return shown + [wr.BarPlot(title=cost, metrics=[cost]) for cost in COSTS]


def headline_claims(target: Target) -> dict[str, str]:
    """Return the patterns of the headlines' claims that are this target's, each with the headline's words.

    Those that the default preset has no claim for are left out: they are of a larger one's tasks.
    """
    papers = yaml.safe_load(HEADLINES.read_text(encoding="utf-8"))
    paper, item = target.key.split("/")
    found: dict[str, str] = {}
    folder = ROOT / "results" / target.key / "embedded"
    claims = [result.claim.id for result in load_claims(folder)] if (folder / FILE_NAME).is_file() else []
    for headline in papers.get(paper, {}).get("headlines", []):
        for claim in headline["claims"]:
            place, _, pattern = claim.rpartition("/")
            if place == item and any(fnmatchcase(name, pattern) for name in claims):
                found[pattern] = headline["says"]
    return found


# ------------------------------------------------------------------------------------ both of them
def workspace(paper: str, entity: str = "") -> Any:
    """Return the workspace of a paper's runs: a section for each target."""
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces import expr

    _same_ids(paper, "workspace")
    return ws.Workspace(
        entity=entity,
        project=PROJECT,
        name=paper_titles()[paper],
        sections=[
            ws.Section(name=f"{target.make_name}: {target.title}", panels=panels(target))
            for target in _targets(paper)
        ],
        runset_settings=ws.RunsetSettings(filters=[expr.Metric("Group") == paper]),
    )


def report(paper: str, entity: str = "") -> Any:
    """Return the report on a paper: for each target its runs, and no account's name."""
    import wandb_workspaces.reports.v2 as wr
    from wandb_workspaces import expr

    _same_ids(paper, "report")
    blocks: list[Any] = [wr.TableOfContents()]
    for target in _targets(paper):
        runs = [expr.Metric("Group") == paper, expr.Metric("JobType") == target.make_name]
        grid = wr.PanelGrid(runsets=[wr.Runset(name=target.make_name, filters=runs)], panels=panels(target))
        blocks += [wr.H2(text=f"{target.make_name}: {target.title}"), wr.P(text=f"make {target.make_name}"), grid]
    return wr.Report(entity=entity, project=PROJECT, title=paper_titles()[paper], blocks=blocks, width="fluid")


def _targets(paper: str) -> list[Target]:
    return [target for target in all_targets().values() if target.paper_key == paper]


def _same_ids(*names: str) -> None:
    """Make the ids that wandb_workspaces draws from `random` the same at every call."""
    random.seed("/".join(names))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:  # a damaged sheet, which it names
        sys.exit(f"error: {error}")
