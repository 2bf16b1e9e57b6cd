"""python -m experiments COMMAND: what the Makefile calls.

    help [TARGET ...]                      every target with a line and the measured time of each preset; or what a
                                           target computes, its presets and keys
    run TARGET ... [KEY=VALUE ...]         one target, with Hydra's whole command line, or several side by side
    judge [TARGET ...]                     claims.json again, from the tables of published results
    draw [TARGET ...]                      figures again, from the tables
    verify [TARGET ...] [KEY=VALUE ...]    results computed again, and what differs from the committed tables
    stale                                  published results of which a file they are made by has changed since
    gather TARGET ... [preset=...]         the tables of its variations (a sweep's jobs) in one, <preset>/sweep/
    new PAPER/ITEM                         lays out a target that runs: its file, claims and config

A TARGET is lissa-fig1, a paper (lissa), figures (all of them), bench, or for judge and draw a result folder.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # `make help` needs nothing installed

from curvlab.lab.targets.help import until_reader_leaves
from curvlab.lab.targets.target import UnknownTargetError

# The module of curvlab.lab.targets and its function, loaded when used: help needs no package, only `run` torch.
_COMMANDS = {
    "help": ("help", "print_help"),
    "run": ("command", "run"),
    "judge": ("execution", "judge_again"),
    "draw": ("execution", "draw_again"),
    "verify": ("verify", "verify"),
    "stale": ("stale", "print_stale"),
    "gather": ("gather", "gather"),
    "new": ("new", "lay_out"),
}
_EXIT_USAGE = 2


def main(arguments: list[str]) -> int:
    """Run one command; return the exit status."""
    command, *rest = arguments or [""]
    asked = [word for word in arguments if word in ("-h", "--help")]
    names = [word for word in rest if "=" not in word and not word.startswith(("-", "~"))]
    if asked and command in ("run", "help") and names:
        command, rest = "help", names  # what each target is about
    elif asked or command not in _COMMANDS:
        print(__doc__, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else _EXIT_USAGE
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two were no faster alone, and slower in company
    module, function = _COMMANDS[command]
    try:
        status: int = getattr(importlib.import_module(f"curvlab.lab.targets.{module}"), function)(rest)
    except UnknownTargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return _EXIT_USAGE
    return status


if __name__ == "__main__":
    status = 0
    with until_reader_leaves():
        status = main(sys.argv[1:])
    sys.exit(status)
