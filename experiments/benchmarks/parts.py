"""A benchmark of several parts, of which `parts` of its config names those that are run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType

from matplotlib.figure import Figure

from curvlab.lab import ClaimResult, ClaimSheet, Computed


def judge_parts(
    parts: Mapping[str, Sequence[ModuleType]], computed: Computed, claims: ClaimSheet
) -> list[ClaimResult]:
    """Judge by the `judge` of each part's modules; the `CLAIMS` of parts that did not run are out of reach."""
    results: list[ClaimResult] = []
    for name, modules in parts.items():
        for module in modules:
            if name in computed.config["parts"]:
                results += module.judge(computed, claims)
            else:
                results += [claims.unjudged(own, f"parts does not name {name}.") for own in module.CLAIMS]
    return results


def draw_parts(parts: Mapping[str, ModuleType], computed: Computed) -> dict[str, Figure]:
    """Return the figures of those of `parts` that ran, by each one's `draw`."""
    figures: dict[str, Figure] = {}
    for name, part in parts.items():
        figures |= part.draw(computed) if name in computed.config["parts"] else {}
    return figures
