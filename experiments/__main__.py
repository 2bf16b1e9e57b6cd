"""python -m experiments help | run | judge | draw | gather | stale | verify: what the Makefile calls.

    help [TARGET ...]                      every target with a line and the measured time of each preset; or what a
                                           target computes, its presets and keys
    run TARGET ... [KEY=VALUE ...]         one target, or several side by side
    judge [TARGET ...]                     claims.json again, from the tables of published results
    draw [TARGET ...]                      figures again, from the tables
    gather TARGET ...                      the tables of its variations (a sweep's jobs) in one, <preset>/sweep/
    stale                                  published results of which a file they are made by has changed since
    verify [TARGET ...] [KEY=VALUE ...]    computes them again and says what differs from the committed tables

A TARGET is lissa-fig1, a paper (lissa), figures (all of them), bench, or for judge and draw a result folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # `make help` needs nothing installed

from curvlab.lab.target.discovery import UnknownTargetError
from curvlab.lab.target.pipe import until_reader_leaves

_EXIT_USAGE = 2


def main(arguments: list[str]) -> int:
    """Run one command; return the exit status."""
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    # What a command needs is imported with it: help needs no package, and only `run` needs torch.
    try:
        if command == "help":
            from curvlab.lab.target.help import print_help

            return print_help(rest)
        if command == "run":
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # two were no faster alone, and slower in company
            from curvlab.lab.target.side_by_side import run

            return run(rest)
        if command in ("judge", "draw"):
            from curvlab.lab.target.again import again

            return again(command, rest)
        if command == "gather":
            from curvlab.lab.target.gather import gather

            return gather(rest)
        if command == "stale":
            from curvlab.lab.target.stale import print_stale

            return print_stale()
        if command == "verify":
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            from curvlab.lab.target.verify import verify

            return verify(rest)
    except UnknownTargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return _EXIT_USAGE
    print(__doc__, file=sys.stderr if command not in ("-h", "--help") else sys.stdout)
    return 0 if command in ("-h", "--help") else _EXIT_USAGE


if __name__ == "__main__":
    status = 0
    with until_reader_leaves():
        status = main(sys.argv[1:])
    sys.exit(status)
