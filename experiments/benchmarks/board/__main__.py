"""python -m experiments.benchmarks.board COMMAND: banks, and a stranger's scores on one of them.

bank NAME ...           computes banks again from their recipes into results/banks, and says how far they are from
                        what was there
score NAME FILE.npy     judges scores, (queries, examples) or one such matrix for each network: docs/enter.md
"""

from __future__ import annotations

import sys

from experiments.benchmarks.board.banks import recompute
from experiments.benchmarks.board.score import judge_file


def main(arguments: list[str]) -> int:
    """Run one command; return the exit status."""
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command == "bank" and rest:
        recompute(rest)
    elif command == "score" and len(rest) == 2:
        judge_file(*rest)
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
