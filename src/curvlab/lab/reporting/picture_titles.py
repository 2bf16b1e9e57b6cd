"""The title of a target's headline picture: what was found, with the numbers of the result that is drawn.

experiments/papers/pictures.yaml, sentences in their order of preference:

lissa/fig1:
  - LiSSA gives the PBRF of the early MLP (r = {agreement-mlp-mnist-early}); paper: points along x = y

{claim} is a claim of the same result, in the forms of `findings`; a sentence with one that it lacks is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import yaml

from curvlab.lab.reporting.claims import UNJUDGED, ClaimResult
from curvlab.lab.reporting.findings import tell
from curvlab.lab.targets.target import ROOT

PICTURES = ROOT / "experiments" / "papers" / "pictures.yaml"
_NAME = re.compile(r"\{([^{}:]+)")


def picture_title(key: str, results: Iterable[ClaimResult], path: Path = PICTURES) -> str:
    """Return the finding of target `key` that these claims can tell, "" where there is none."""
    paper, _, item = key.partition("/")
    own = {f"{key}/{result.claim.id}": result for result in results if result.weighed not in UNJUDGED}
    for sentence in _sentences(path).get(key, ()):
        if all(f"{key}/{name}" in own for name in _NAME.findall(sentence)):
            return tell(paper, _NAME.sub(lambda match: f"{{{paper}/{item}/{match[1]}", sentence), own)
    return ""


@cache
def _sentences(path: Path) -> dict[str, Sequence[str]]:
    """Return the sentences by target; none where a package without experiments/ was installed."""
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
