"""The claims that a reader of a paper remembers, and what became of them here.

They are data, in <papers>/headlines.yaml, and name claims that targets judge:

    lissa:
      - says: LiSSA with the recommended hyperparameters gives the PBRF.
        claims: [lissa/fig1/agreement-*, lissa/fig1/slope-*]

A star stands for the variants of a claim, e.g. "agreement-mlp-mnist".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from curvlab.lab.reporting.claims import VERDICTS, ClaimResult
from curvlab.lab.reporting.result_folder import ResultFolder

FILE_NAME = "headlines.yaml"


@dataclass(frozen=True)
class Headline:
    """One sentence of a paper with the claims that test it.

    Args:
        says: the sentence, in our words.
        claims: "<paper>/<item>/<claim>", with stars as in file names.
    """

    says: str
    claims: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """What one preset found on a headline.

    Args:
        preset: the preset.
        verdicts: how many of the claims have each verdict, in the order of `VERDICTS`; none with 0.
        results: the claims, each with the folder it stands in.
    """

    preset: str
    verdicts: Mapping[str, int]
    results: tuple[tuple[ResultFolder, ClaimResult], ...]


def load_headlines(papers: str | Path) -> dict[str, tuple[Headline, ...]]:
    """Return the headlines by paper; none when there is no such file.

    Raises:
        ValueError: the file cannot be read; says what an entry needs.
    """
    path = Path(papers) / FILE_NAME
    if not path.is_file():
        return {}
    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(path))
        return {
            str(paper): tuple(Headline(str(entry["says"]), tuple(map(str, entry["claims"]))) for entry in entries)
            for paper, entries in content.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, YAMLError) as error:
        raise ValueError(
            f"{FILE_NAME} is damaged ({type(error).__name__}): each paper needs a list of `says` and `claims`."
        ) from error


def findings(headline: Headline, folders: Sequence[ResultFolder]) -> tuple[Finding, ...]:
    """Return what each preset that has one of the headline's claims found, in the order of `folders`."""
    found: dict[str, list[tuple[ResultFolder, ClaimResult]]] = {}
    for folder in folders:
        for result in folder.claims:
            name = f"{folder.key}/{result.claim.id}"
            if any(fnmatchcase(name, claim) for claim in headline.claims):
                found.setdefault(folder.preset, []).append((folder, result))
    return tuple(
        Finding(preset, count_verdicts(result.verdict for _, result in results), tuple(results))
        for preset, results in found.items()
    )


def count_verdicts(verdicts: Iterable[str]) -> dict[str, int]:
    """Return how often each verdict occurs, in their fixed order; none with 0."""
    counts = Counter(verdicts)
    return {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]}
