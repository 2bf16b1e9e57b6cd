"""python -m experiments.benchmarks.board COMMAND: banks, and a stranger's scores on one of them.

bank NAME ...           computes banks again from their recipes into results/banks, and says how far they are from
                        what was there
score NAME FILE.npy     judges scores, (queries, examples) or one such matrix for each network: docs/enter.md
add PRESET [NAME ...]   computes what the published board of a preset lacks of the tasks of these banks: a task, or
                        methods, and methods whose grid has grown; all else keeps its rows, and run.json goes on
                        saying which commit computed which
"""

from __future__ import annotations

import sys
from collections.abc import Collection

from curvlab.lab import Computed, all_targets, draw_target, load_config, start, task_settings
from curvlab.lab.runs.record import read_record
from curvlab.lab.targets.execution import judge_target
from curvlab.lab.targets.settings import settings_beside_the_paper
from experiments.benchmarks.board.banks import recompute
from experiments.benchmarks.board.compute import compute
from experiments.benchmarks.board.score import judge_file


def main(arguments: list[str]) -> int:
    """Run one command; return the exit status."""
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command == "bank" and rest:
        recompute(rest)
    elif command == "add" and rest:
        add(rest[0], rest[1:])
    elif command == "score" and len(rest) == 2:
        judge_file(*rest)
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


def add(preset: str, names: Collection[str]) -> None:
    """Compute what a published board lacks of tasks, by their banks; other rows stay, with their commits."""
    target = all_targets()["benchmarks/board"]
    cfg = load_config(target, [f"preset={preset}", "tracker=none"])
    with start(cfg, key=target.key, title=target.title) as run:
        published = dict(Computed.of(run.folder))
        banks = [str(own.bank) for own in task_settings(cfg).values()]
        if wrong := [name for name in names if name not in banks]:
            sys.exit(f"error: {', '.join(wrong)}: no task of preset={preset}, which has {', '.join(banks)}")
        run.take_over(read_record(run.folder))
        found = compute(run, cfg, published, names)
        for name, table in found.items():
            run.save_table(table, name, digits=target.digits.get(name, 6))
        run.save_record(settings_beside_the_paper(target, cfg, found))
    judge_target(target, run.folder)
    draw_target(target, run.folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
