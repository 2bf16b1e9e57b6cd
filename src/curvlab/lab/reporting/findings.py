"""What was found on each headline of a paper: a verdict by rule, and a sentence whose numbers are claims'.

experiments/papers/headlines.yaml:

lissa:
  says: A stochastic solver gives influence functions of any network.             # the paper, in a sentence or two
  found: LiSSA works for networks stopped early ({fig1/agreement-mlp-mnist-early}).   # what we found
  picture: lissa/fig4                            # the target whose picture stands beside them
  easy: ...                                      # and `hard`, `leaves open`: the last parts of its page
  headlines:
    - says: LiSSA with these hyperparameters gives the proximal Bregman response.     # what a reader remembers
      claims: [fig1/agreement-*]                 # <item>/<claim> of this paper, a star stands for variants
      short: correlation of LiSSA with the PBRF  # what `shown` measures, for the picture of all headlines
      shown: fig1/agreement-mlp-mnist-early      # the claim that the picture shows
      finding: It does for networks stopped early (correlation {fig1/agreement-mlp-mnist-early}).
      number: [0.90, 0.97]                       # optional, for the picture: of the claims' paper_value
      per: 100                                   # optional: times this, ours is in the unit of `short`, `number`

A number in a sentence is a claim in braces, never typed: {item/claim} is its value x with two digits.
{item/claim:-}, {item/claim:%}, {item/claim:-%}, {item/claim:/}, {item/claim:1/(1-)} and {item/claim:10^} are
-x, x and -x in percent, 1/x, 1/(1-x) and 10^x; {item/claim:-log %} is e^-x - 1 in percent, {item/claim:100} 100
x; {item/claim:at most} and {item/claim:100 at most} are the upper ends of their intervals;
{item/claim:interval} is x with its interval, {item/claim:points} and {item/claim:-points} the same in
percentage points; {item/claim:paper} is what the paper states, {item/claim:zero %} the claim's word `zero`, in
percent. A name with three parts is another paper's, {benchmarks/llc/ratio}. A name with stars stands for many:
{item/claim-*:largest} is the largest value, {item/claim-*:count} how many were judged, and {item/claim-*:count
VERDICT} how many of them so. "(no value)" stands where results lack it.

The verdict of a headline is that of its claims at the largest preset that has judged one of them: of the
paper's own, unless it says "Ours: ". Claims out of reach or not asked there do not count, but those that were
measured and not asked for want of power are undecided here; with R reproduced, D direction only, U undecided, N
not reproduced or refuted of the others:

    out of reach       none is left
    in part            N > 0 and R + D > 0
    not reproduced     N > 0 and R = D = 0
    reproduced         N = 0 and R > D + U
    direction only     N = 0, not reproduced, and R + D > U
    undecided          otherwise

A headline says that all of its claims hold: one that fails contradicts it, one that holds does not settle those
that are open. Until 2026-11-28 "not reproduced" asked for N >= U, too, and values of fewer than three seeds
counted as undecided: two headlines of Ginger and one of the PBRF have other verdicts since.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from curvlab.lab.claims.claims import (
    DIRECTION_ONLY,
    NOT_ASKED,
    NOT_REPRODUCED,
    OUT_OF_REACH,
    REFUTED,
    REPRODUCED,
    UNDECIDED,
    UNJUDGED,
    ClaimResult,
)
from curvlab.lab.claims.intervals import Interval, exact
from curvlab.lab.reporting.results import ResultFolder
from curvlab.lab.targets.target import PRESETS, ROOT

HEADLINES = ROOT / "experiments" / "papers" / "headlines.yaml"

IN_PART = "in part"
NO_VALUE = "(no value)"
HEADLINE_VERDICTS = (REPRODUCED, DIRECTION_ONLY, IN_PART, UNDECIDED, NOT_REPRODUCED, OUT_OF_REACH)
_REFERENCE = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")


@dataclass(frozen=True)
class Headline:
    """An entry of headlines.yaml.

    Args:
        paper: its key.
        says: what the paper says, in our words.
        claims: patterns of the claims that test it, "<paper>/<item>/<claim>".
        short: what the shown claim measures.
        shown: the claim that stands for the headline in the picture, "<paper>/<item>/<claim>".
        finding: what was found, with references in the place of numbers.
        number: the paper's, one or the ends of its range; none where it states none.
        per: what our value is multiplied by to be in their unit.
    """

    paper: str
    says: str
    claims: tuple[str, ...]
    short: str
    shown: str
    finding: str
    number: tuple[float, ...] = ()
    per: float = 1.0

    @property
    def is_ours(self) -> bool:
        """Whether it is of claims that the paper does not make."""
        return self.says.startswith("Ours: ")


@dataclass(frozen=True)
class Finding:
    """What was found on a headline.

    Args:
        headline: the headline.
        preset: the largest preset that has judged one of its claims; "" when none has.
        results: its claims there, by "<paper>/<item>/<claim>".
        verdict: by the rule at the head of this module.
        text: the headline's finding, with its numbers.
        shown: the claim of the picture; None when it is out of reach.
    """

    headline: Headline
    preset: str
    results: Mapping[str, ClaimResult]
    verdict: str
    text: str
    shown: ClaimResult | None

    @property
    def short(self) -> str:
        """What was found, the first sentence, and what to do because of it, the last."""
        sentences = re.split(r"(?<=\.) (?=[A-Z])", self.text)
        return " ".join(dict.fromkeys((sentences[0], sentences[-1])))


@dataclass(frozen=True)
class PaperFindings:
    """What was found on a paper.

    Args:
        paper: its key.
        says: what it says, in our words.
        text: what was found, with its numbers.
        picture: the key of the target whose picture stands beside them.
        easy, hard, leaves_open: what it took to reproduce it, and what it does not answer; may be empty.
        findings: on its headlines, in the order of headlines.yaml.
    """

    paper: str
    says: str
    text: str
    picture: str
    easy: str
    hard: str
    leaves_open: str
    findings: tuple[Finding, ...]


def find(folders: Sequence[ResultFolder], path: Path = HEADLINES) -> tuple[PaperFindings, ...]:
    """Return what the results say on each paper of a headlines.yaml that has results.

    Raises:
        ValueError: an entry lacks a key, has an unknown one, or a number that the paper does not state; names it.
    """
    claims = {preset: _claims_at(preset, folders) for preset in PRESETS}
    best = best_claims(folders)
    there = {folder.paper for folder in folders}
    try:
        return tuple(
            PaperFindings(
                paper,
                str(entry["says"]),
                tell(paper, str(entry["found"]), best),
                str(entry["picture"]),
                tell(paper, str(entry.get("easy", "")), best),
                tell(paper, str(entry.get("hard", "")), best),
                tell(paper, str(entry.get("leaves open", "")), best),
                tuple(_find(_headline(paper, each), claims, best) for each in entry["headlines"]),
            )
            for paper, entry in yaml.safe_load(path.read_text(encoding="utf-8")).items()
            if paper in there
        )
    except (OSError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise ValueError(
            f"{path.name} is damaged ({type(error).__name__}: {error}): each paper needs says, found, picture and "
            "headlines."
        ) from error


def best_claims(folders: Sequence[ResultFolder]) -> dict[str, ClaimResult]:
    """Return every claim by "<paper>/<item>/<claim>", at the largest preset that has it."""
    return {name: result for preset in PRESETS for name, result in _claims_at(preset, folders).items()}


def _claims_at(preset: str, folders: Sequence[ResultFolder]) -> dict[str, ClaimResult]:
    return {
        f"{folder.key}/{result.claim.id}": result
        for folder in folders
        if folder.preset == preset
        for result in folder.claims
    }


def _headline(paper: str, entry: Mapping[str, Any]) -> Headline:
    stated = entry.get("number", [])
    numbers = tuple(float(each) for each in (stated if isinstance(stated, list) else [stated]))
    claims = tuple(_whole(paper, claim) for claim in entry["claims"])
    read: dict[str, Any] = {"claims": claims, "shown": _whole(paper, entry["shown"]), "number": numbers}
    read["per"] = float(entry.get("per", 1))  # YAML reads 1e-3 as text
    return Headline(paper=paper, **{**entry, **read})  # a TypeError names a key that it lacks, or has too much


def _find(
    headline: Headline, claims: Mapping[str, Mapping[str, ClaimResult]], best: Mapping[str, ClaimResult]
) -> Finding:
    for preset in reversed(PRESETS):
        there = claims[preset]
        own = {
            name: result
            for name, result in there.items()
            if any(fnmatchcase(name, pattern) for pattern in headline.claims)
            and result.claim.is_ours == headline.is_ours
        }
        if any(result.weighed not in UNJUDGED for result in own.values()):
            break
    else:
        return Finding(headline, "", {}, OUT_OF_REACH, "No preset has judged it yet.", None)
    shown = there.get(headline.shown)
    said = " ".join(str(result.claim.paper_value) for result in own.values())
    for number in headline.number:
        if shown is not None and f"{number:g}" not in said:
            raise ValueError(
                f"headlines.yaml, {headline.says!r}: number: {number:g} stands in no paper_value of its claims"
            )
    verdict = headline_verdict(result.weighed for result in own.values())
    text = tell(headline.paper, headline.finding, {**best, **there})  # what it does not have, another preset may
    return Finding(headline, preset, own, verdict, text, shown if shown and shown.interval else None)


def headline_verdict(verdicts: Iterable[str]) -> str:
    """Return the verdict of a headline whose claims have these, by the rule at the head of this module."""
    counts = Counter(verdicts)
    reproduced, direction, undecided = counts[REPRODUCED], counts[DIRECTION_ONLY], counts[UNDECIDED]
    failed = counts[NOT_REPRODUCED] + counts[REFUTED]
    if reproduced + direction + undecided + failed == 0:
        return OUT_OF_REACH
    if failed and reproduced + direction:
        return IN_PART
    if failed:
        return NOT_REPRODUCED
    if reproduced > direction + undecided:
        return REPRODUCED
    return DIRECTION_ONLY if reproduced + direction > undecided else UNDECIDED


def tell(paper: str, sentence: str, claims: Mapping[str, ClaimResult]) -> str:
    """Return a sentence on a paper with the numbers of the claims that it refers to."""

    def number(match: re.Match[str]) -> str:
        name, form = _whole(paper, match[1]), match[2] or ""
        if "*" in name:
            return _of_many([claims[own] for own in claims if fnmatchcase(own, name)], form)
        if form not in _FORMS:
            raise ValueError(
                f"headlines.yaml, {paper}: {match[0]}: after a colon stands one of {', '.join(_FORMS)}"
            )
        result = claims.get(name)
        if result is None or result.value is None or result.interval is None:
            return NO_VALUE
        return _FORMS[form](result, result.value, result.interval)

    return _REFERENCE.sub(number, sentence)


def _of_many(results: Sequence[ClaimResult], form: str) -> str:
    if form == "largest":
        values = [result.value for result in results if result.value is not None]
        return written(max(values)) if values else NO_VALUE
    what, _, verdict = form.partition(" ")
    if what != "count":
        raise ValueError(f"of many claims there are the forms largest, count and count VERDICT, not {form!r}")
    judged = [result.verdict for result in results if result.verdict not in UNJUDGED]
    return str(judged.count(verdict) if verdict else len(judged))


def with_number(sentence: str, value: float) -> str:
    """Return a sentence with a number of our own in the place of {} or {:form}."""
    interval = exact(value)
    return re.sub(r"\{:?([^{}]*)\}", lambda match: _FORMS[match[1]](None, value, interval), sentence)


def written(value: float, digits: int = 2) -> str:
    """Return a number with two digits, with all before the point, and an exponent only where it must be."""
    size = abs(value)
    if 0.995 <= size < 1 or 99.5 <= size < 100 or 1 < size < 1.005:  # not quite all, or hardly more
        text = f"{size:.4g}"
    elif 1 < size < 1.05:
        text = f"{size:.3g}"
    else:
        text = f"{size:,.0f}" if 10 ** (digits - 1) <= size < 1e5 else f"{size:.{digits}g}"
    text = re.sub(r"e([+-])0*", r"e\1", text).replace("e+", "e")
    return f"−{text}" if value < 0 else text


def _with_interval(value: float, interval: Interval, unit: float = 1.0) -> str:
    low, high = sorted((unit * interval.low, unit * interval.high))
    read = [float(written(end).replace("−", "-").replace(",", "")) for end in (low, high)]
    moved = max(abs(read[0] - low), abs(read[1] - high))
    digits = 3 if moved > 0.1 * (high - low) > 0 else 2  # two would move an end by a tenth of the interval
    shown, least, most = (written(each, digits) for each in (unit * value, low, high))
    return f"{shown} ({least} to {most})" if least != most else shown


_FORMS: Mapping[str, Callable[[ClaimResult | None, float, Interval], str]] = {
    "": lambda _, value, __: written(value),
    "%": lambda _, value, __: f"{written(100 * value)} %",
    "-%": lambda _, value, __: f"{written(-100 * value)} %",
    "-log %": lambda _, value, __: f"{written(100 * math.expm1(-value))} %",
    "100": lambda _, value, __: written(100 * value),
    "/": lambda _, value, __: written(1 / value),
    "10^": lambda _, value, __: written(10**value),
    "-": lambda _, value, __: written(-value),
    "1/(1-)": lambda _, value, __: written(1 / (1 - value)),
    "at most": lambda _, __, interval: written(interval.high),
    "100 at most": lambda _, __, interval: written(100 * interval.high),
    "interval": lambda _, value, interval: _with_interval(value, interval),
    "% interval": lambda _, value, interval: _with_interval(value, interval, unit=100.0) + " %",
    "points": lambda _, value, interval: _with_interval(value, interval, unit=100.0),
    "-points": lambda _, value, interval: _with_interval(value, interval, unit=-100.0),
    "paper": lambda result, _, __: str(result.claim.paper_value) if result else NO_VALUE,
    "zero %": lambda result, _, __: (
        f"{written(100 * float(result.claim.words['zero']))} %" if result else NO_VALUE
    ),
}


def _whole(paper: str, name: str) -> str:
    return name if name.count("/") == 2 else f"{paper}/{name}"


# ------------------------------------------------------------------------------------ titles of pictures
# The title of a target's headline picture: what was found, with the numbers of the result that is drawn.
#
# experiments/papers/pictures.yaml, sentences in their order of preference:
#
# lissa/fig1:
#   - LiSSA gives the PBRF of the early MLP (r = {agreement-mlp-mnist-early}); paper: points along x = y
#
# {claim} is a claim of the same result, in the forms above; a sentence with one that it lacks is left out.
# What is undecided or not asked shows its interval.
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
