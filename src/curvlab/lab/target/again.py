"""Judge or draw results again, from their tables alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from curvlab.lab.target.published import published, result_folders


def again(act: str, names: Sequence[str]) -> int:
    """Judge or draw (`act`) the results of the targets `names`, or all published ones; return the exit status.

    A folder that cannot be read (damaged, or made by a target that has changed since) is named, and the others
    go on.
    """
    from curvlab.lab.target.execution import draw_target, judge_target  # torch and pandas: after the names

    status = 0
    for target, folder in result_folders(names) if names else published():
        try:
            (judge_target if act == "judge" else draw_target)(target, folder)
        except (ValueError, KeyError, AttributeError, OSError) as error:
            print(f"{folder.as_posix()}: cannot {act} it: {error}", file=sys.stderr)
            status = 1
        else:
            print(folder.as_posix())
    return status
