"""The title of a target's headline picture: what was found, with the numbers of the result that is drawn.

experiments/papers/pictures.yaml, sentences in their order of preference:

lissa/fig1:
  - LiSSA gives the PBRF of the early MLP (r = {agreement-mlp-mnist-early}); paper: points along x = y

{claim} is a claim of the same result, in the forms of `findings`; a sentence with one that it lacks is left out.
What is undecided or not asked shows its interval.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import yaml

from curvlab.lab.claims.claims import NOT_ASKED, UNDECIDED, UNJUDGED, ClaimResult
from curvlab.lab.reporting.findings import tell
from curvlab.lab.targets.target import ROOT

PICTURES = ROOT / "experiments" / "papers" / "pictures.yaml"
_NAME = re.compile(r"\{([^{}:]+)")
_PLAIN = re.compile(r"\{([^{}:]+)(?::(%))?\}")


def picture_title(key: str, results: Iterable[ClaimResult], path: Path = PICTURES) -> str:
    """Return the finding of target `key` that these claims can tell, "" where there is none."""
    paper, _, item = key.partition("/")
    own = {f"{key}/{result.claim.id}": result for result in results if result.weighed not in UNJUDGED}
    for sentence in _sentences(path).get(key, ()):
        if all(f"{key}/{name}" in own for name in _NAME.findall(sentence)):
            told = _PLAIN.sub(partial(_open_with_interval, key, own), sentence)
            return tell(paper, _NAME.sub(lambda match: f"{{{paper}/{item}/{match[1]}", told), own)
    return ""


def _open_with_interval(key: str, own: Mapping[str, ClaimResult], match: re.Match[str]) -> str:
    is_open = own[f"{key}/{match[1]}"].verdict in (UNDECIDED, NOT_ASKED)
    return f"{{{match[1]}:{'% ' if match[2] else ''}interval}}" if is_open else match[0]


@cache
def _sentences(path: Path) -> dict[str, Sequence[str]]:
    """Return the sentences by target; none where a package without experiments/ was installed."""
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
