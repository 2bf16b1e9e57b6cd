"""Overrides as they are typed: short forms are made long, and a mistyped one is refused before anything runs.

A short form need not name a task: `data=mnist`, `model.hidden_sizes=[64]`, `task=mlp_digits`.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from hydra import compose
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

PARTS = ("data", "model", "training", "freeze")  # of a task
_NEAR = 0.4  # difflib's similarity from which a name is worth suggesting
# What a number must be, in words.
_FITS: Mapping[str, Callable[[float], bool]] = {
    "a number": lambda number: True,
    "a number, at least 0": lambda number: number >= 0,
    "at least 0": lambda number: number >= 0,
    "greater than 0": lambda number: number > 0,
    "a whole number, at least 0": lambda number: number >= 0 == number % 1,
    "a whole number, at least 1": lambda number: number >= 1 and number % 1 == 0,
    "from 0 to 1": lambda number: 0 <= number <= 1,
    "between 0 and 1": lambda number: 0 < number < 1,
    "at least 0 and below 1": lambda number: 0 <= number < 1,
}
# What settings of these names must be, whatever their target: found before anything is loaded or computed. The
# first that fits holds; other settings that are numbers must be at least 0.
_RANGES: Mapping[str, str] = {
    "a whole number, at least 0": r"num_(repeats|burnin_steps)|(\w+_)?seeds?|checkpoints|(exact_)?points|widths|"
    r"max_tridiag_iter|\w+_token_id",
    "greater than 0": r"lrs?|step_sizes?|(\w+_)?rtols?|localizations?|tolerance|tol|stability|stabilities|"
    r"epsilons?|clip|safety|(assumed_)?constant|scale|\w+_divisor|horizon|(time|memory)_limit|ridges|rates_over_damping|"
    r"low|middle|high|\w+_factors?|(largest|smallest)_step|converged_below|gradient_norm|width_mult|displacement",
    "at least 0": r"weight_decay|l2|alphas?|warmup_steps|(\w+_)?dampings?(_ratios?)?",
    "a whole number, at least 1": r"(num|n|d|steps_per)_\w+|(\w+_)?(batch|size|rank|width|depth|epoch|direction|"
    r"network|vector|point|step|trial|probe|round|channel|sentence|example|length|column)s?|(\w+_)?(batch_sizes|"
    r"hidden_sizes|at_once|dim|every|train|vocabulary|shape)|max_(steps_network|matvecs|words|documents|iter|"
    r"stretches|position_embeddings)|maxiter|checkpoints_per_segment|update_period|min_letters|pooling|top|"
    r"repeat_below|costs",
    "from 0 to 1": r"label_noise|dropout|removed|part_way|correlations|(\w+_)?fractions?",
    "a number": r"starts?",
    "between 0 and 1": r"(\w+_)?decays?",
    "at least 0 and below 1": r"momentum",
}
# Likewise: key, what each entry may be, and what to say.
_WORDS = (
    ("device", r"auto|cpu|mps|cuda(:\d+)?", "auto, cpu, cuda, cuda:N or mps"),
    ("seed", r"-?\d+|range\([\d,]+\)|\d+\)|range\(\d+", "a whole number, or range(10) in a sweep"),
    ("tasks", r"", "named by task=NAME, which runs it alone"),
)


class ConfigurationError(ValueError):
    """The command line asks for something that does not exist; the text says what does."""


def checked_config(config_name: str, overrides: Sequence[str], *, multirun: bool = False) -> DictConfig:
    """Return the config that overrides give, after checking them in every combination of swept config groups.

    Needs an initialised Hydra. Cost: one composition per combination; a second one where a key is set.

    Args:
        config_name: primary config.
        overrides: as on the command line.
        multirun: whether they may sweep; then the config is that of the last combination.

    Raises:
        ConfigurationError: with the key or value that is wrong, the nearest valid name and the valid ones.
    """
    loader = GlobalHydra.instance().config_loader()
    parser = OverridesParser.create(config_loader=loader)
    parsed = [_parse(parser, line) for line in overrides]
    in_group = [override for override in parsed if loader.get_group_options(override.key_or_group)]
    in_config = [override for override in parsed if override not in in_group]
    for override in in_group:
        _check_choice(override, loader)
    first_values = [line for override in in_config for line in itertools.islice(_lines(override, multirun), 1)]
    combinations = list(itertools.product(*[list(_lines(override, multirun)) for override in in_group]))
    for choices in combinations or [()]:  # none when a group is given an interval, which Hydra refuses later
        if in_config:  # before Hydra refuses a key, in words that name none that was meant
            whole = _compose(config_name, choices, choices, loader, return_hydra_config=True)
            stands: Any = OmegaConf.to_container(whole)
            for override in in_config:
                _check_key(override, stands, loader)
                if not override.is_delete():
                    _check_values(override, parser, stands)
        config = _compose(config_name, [*choices, *first_values], choices, loader)
    _check_tasks(config, [str(override.input_line) for override in parsed if override.is_delete()])
    return config


def _compose(
    config_name: str, lines: Sequence[str], choices: Sequence[str], loader: ConfigLoader, **settings: bool
) -> DictConfig:
    try:
        return compose(config_name, list(lines), **settings)
    except (HydraException, OmegaConfBaseException) as error:
        _explain(str(error), config_name, loader, choices)


def _check_tasks(config: DictConfig, deletions: Sequence[str]) -> None:
    """Refuse a task of which deletions left settings without data or model, and that none is left."""
    if not config.get("tasks") and any("tasks" in line for line in deletions):
        raise ConfigurationError(f"{' '.join(deletions)} leaves no task to compute.")
    for name, own in (config.get("tasks") or {}).items():
        taken = next((line for line in deletions if re.search(rf"\btasks\.{name}(?!\w)", line)), None)
        lacks = [part for part in ("data", "model") if own is not None and "_target_" not in (own.get(part) or {})]
        if taken and lacks:
            raise ConfigurationError(
                f"{taken!r} leaves task {name!r} without {' and '.join(lacks)}, and keeps its {', '.join(own)}: "
                f"delete the whole task with '~tasks.{name}'."
            )


def _check_values(override: Override, parser: OverridesParser, config: Any) -> None:
    """Check the numbers of an override, of a sweep all of them, by their names and by what stands in `config`."""
    names = re.sub(r"\[(\w+)\]", r".\1", override.key_or_group).split(".")
    if override.is_interval_sweep() or names[0] == "hydra":
        return
    for name in names:
        entries = dict(enumerate(config)) if isinstance(config, list) else config
        place = int(name) if isinstance(config, list) and name.isdecimal() else name
        config = entries.get(place) if isinstance(entries, dict) else None
    name = next((name for name in reversed(names) if not name.isdecimal()), "")
    for text in override.sweep_string_iterator() if override.is_discrete_sweep() else [None]:
        given = override if text is None else _parse(parser, f"{override.get_key_element()}={text}")
        value = given.value()
        whole = value is None or isinstance(value, dict) or "${" in str(value)  # what may replace a mapping
        if isinstance(config, dict) and config and not whole:
            raise ConfigurationError(
                f"{override.input_line}: {name} holds {', '.join(map(str, config))}; set one of these, as "
                f"{override.key_or_group}.{next(iter(config))}=..."
            )
        try:
            refuse_out_of_range(name, value, config)
        except ValueError as error:
            raise ConfigurationError(f"{override.input_line} is out of range: {error}.") from None


def refuse_out_of_range(name: str, value: Any, stands: Any) -> None:
    """Raise a ValueError where a setting is a number by its name, or by what stands there, and `value` is none.

    Or one out of range. No number of any config is negative: a setting whose name has no range must be at least 0.

    Args:
        name: of the setting, e.g. "lr".
        value: its new value; of lists and mappings each entry is looked at.
        stands: its value before; None where it is new.
    """
    if isinstance(value, dict):
        for key, own in value.items():
            refuse_out_of_range(str(key), own, stands.get(key) if isinstance(stands, dict) else None)
        return
    if isinstance(value, list):
        for own in value:
            refuse_out_of_range(name, own, stands)
        return
    first = stands
    while isinstance(first, list):
        first = first[0] if first else None
    # A reference is resolved when it is known what it means; a column of a data set has a name.
    is_text = isinstance(value, str) and ("${" in value or isinstance(first, str))
    if value is None or is_text or isinstance(first, dict) or (isinstance(first, bool) and type(value) is bool):
        return
    if isinstance(first, bool):
        raise ValueError(f"{name} must be true or false")
    words = next((words for words, names in _RANGES.items() if re.fullmatch(names, name)), None)
    if words is None and not isinstance(first, int | float):
        return
    words = words or "a number, at least 0"
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not (is_number and _FITS[words](value)):
        raise ValueError(f"{name} must be {words}")


def _parse(parser: OverridesParser, line: str) -> Override:
    try:
        return parser.parse_override(line)
    except HydraException as error:  # not always its OverrideParseException
        reason = str(error).splitlines()[0]
        raise ConfigurationError(f"cannot read {line!r} ({reason}); write it as key=value.") from None


def _lines(override: Override, multirun: bool) -> Iterator[str]:
    """Yield the override once per swept value; as typed when it is no sweep."""
    if multirun and override.is_discrete_sweep():
        for value in override.sweep_string_iterator():
            yield f"{override.get_key_element()}={value}"
    elif not (multirun and override.is_interval_sweep()):  # an interval has no first value to try
        yield str(override.input_line)


def _check_choice(override: Override, loader: ConfigLoader) -> None:
    group = override.key_or_group
    options = loader.get_group_options(group)
    if override.is_discrete_sweep():
        values: list[Any] = list(override.sweep_string_iterator())
    else:
        value = override.value()
        values = value if isinstance(value, list) else [value]
    for value in values:
        name = value.strip("'\"") if isinstance(value, str) else value
        if isinstance(name, str) and "${" not in name and name.removesuffix(".yaml") not in options:
            _refuse_choice(group, name, options)


def _refuse_choice(group: str, name: str, options: Iterable[str]) -> NoReturn:
    raise ConfigurationError(
        f"unknown choice {name!r} for {group!r}{_suggestion(name, options)}\n"
        f"Choices of {group!r}: {', '.join(sorted(options))}."
    )


def _check_key(override: Override, config: dict[str, Any], loader: ConfigLoader) -> None:
    key = override.key_or_group
    node: Any = config
    walked: list[str] = []
    for part in re.sub(r"\[(\w+)\]", r".\1", key).split("."):
        if not isinstance(node, dict):
            return  # an index of a list, or a node that is only known when resolved: Hydra decides
        if part not in node:
            break
        node = node[part]
        walked.append(part)
    else:
        return
    is_new = override.is_add() or override.is_force_add()
    if is_new and ("_target_" in node or walked[:1] == ["hydra"]):
        return  # an argument of a class or of Hydra, which check their own
    if is_new and walked[:1] == ["tasks"] != walked:
        others = {*config, *(name for task in config["tasks"].values() for name in task or ())}
        if len(walked) == 2 and part in others:
            return  # what another task has, or what stands beside them
    place = ".".join(walked)
    keys = [name for name in node if not (name == "hydra" and node is config)]
    groups = loader.list_groups("") if not walked else []
    dotted = list(_dotted(config))
    short = [key.split(".", 2)[2] for key in dotted if re.match(rf"tasks\.\w+\.({'|'.join(PARTS)})\b", key)]
    known = {*dotted, *short, *keys, *(group for group in groups if group != "hydra")}
    raise ConfigurationError(
        f"unknown key {key!r}{_suggestion(key, known)}\n"
        + (f"Keys of {place!r}: " if place else "Keys: ")
        + f"{', '.join(sorted(keys))}."
    )


def _dotted(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if key == "hydra" and not prefix:
            continue
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{key}.")


def _suggestion(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=_NEAR)
    return f"; did you mean {near[0]!r}?" if near else "."


def _explain(message: str, config_name: str, loader: ConfigLoader, choices: Sequence[str]) -> NoReturn:
    """Turn what Hydra refuses for reasons of its own into our error."""
    unused = re.search(r"Could not override '([^']+)'\. No match in the defaults list", message)
    if missing := re.search(r"Could not find '([^'\n]+)/([^'/\n]+)'", message):
        group, name = missing.groups()
        is_beside = "/" in group and loader.get_group_options(group.rpartition("/")[2])
        if not is_beside and (options := loader.get_group_options(group)):
            _refuse_choice(group, name, options)
        # Hydra looks for the `model` of +model=mlp beside the primary config, where there is none.
        unused = re.search(r"([^/]+)$", group)
    if unused:
        preset = [choice for choice in choices if choice.startswith("preset=")]
        config: DictConfig = compose(config_name, preset, return_hydra_config=True)
        # `preset` chooses what goes to the top of the config.
        brought = re.compile(r"hydra.*|.*@_global_")
        groups = sorted(group for group in config.hydra.runtime.choices if not brought.fullmatch(group))
        raise ConfigurationError(
            f"{config_name} has no {unused[1]!r} to choose; it chooses among: {', '.join(groups)}."
            + (" A task is added by +task@tasks.NAME=NAME." if unused[1] == "task" else "")
        ) from None
    if twice := re.match(r"Multiple values for (\S+)\.|(\S+) appears more than once", message):
        raise ConfigurationError(f"{twice[1] or twice[2]} is chosen already: change it without +.") from None
    raise ConfigurationError(f"{message.strip().splitlines()[0].rstrip('.')}.") from None


# ------------------------------------------------------------------------------------ short forms
def expand(config_name: str, overrides: Sequence[str]) -> dict[str, str]:
    """Return the overrides as Hydra knows them, each with the one that was typed.

    `data=NAME` and `model=NAME` choose for every task, `data.KEY=...`, `model.KEY=...`, `training.KEY=...` and
    `freeze.KEY=...` set a key of every task; with `task=NAME` this one task is run, alone, and they mean it. What
    stands beside the tasks, for all of them, is left as it was typed. Needs an initialised Hydra.

    Raises:
        ConfigurationError: for numbers that no target can work with, and for tasks that there are not.
    """
    for override in overrides:
        _check_word(override)
        _find_added(config_name, override)
    typed = dict.fromkeys(overrides)
    chosen = [override for override in typed if override.startswith("task=")]
    short = [override for override in typed if _part(override)]
    if not chosen and not short:
        return {override: override for override in typed}
    rest = [override for override in typed if override not in chosen and override not in short]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    # Of a sweep the first value: its jobs have the same tasks.
    firsts = [first for line in rest for first in itertools.islice(_lines(_parse(parser, line), True), 1)]
    config = _composed(config_name, firsts)
    if config is None:
        checked_config(config_name, firsts)  # says which is mistyped, before the short forms are taken for it
        return {override: override for override in typed}
    tasks = config.get("tasks")
    if tasks is None:  # a target without tasks has keys of these names itself, or none
        return {override: override for override in typed}
    rest += [override for override in short if _part(override) in config]
    short = [override for override in short if override not in rest]
    expanded = {override: override for override in rest}
    names = [str(name) for name in tasks]
    if chosen:
        name = chosen[-1].partition("=")[2]
        if name not in names:
            hint = _suggestion(name, names)
            raise ConfigurationError(f"no task {name!r} here{hint} This preset has: {', '.join(names)}.")
        expanded |= {f"~tasks.{other}": chosen[-1] for other in names if other != name}
        names = [name]
    for override in short:
        if len(names) > 1 and re.search(r"=[^\[{(]*,", override):
            raise ConfigurationError(
                f"{override!r} sweeps over {len(names)} tasks at once ({', '.join(names)}); add task=NAME."
            )
        expanded |= {_long(override, name): override for name in names}
    return expanded


def _check_word(override: str) -> None:
    """Refuse devices, seeds and tasks that there are not."""
    key, _, text = override.partition("=")
    for word, allowed, what in _WORDS:
        if key == word and not all(re.fullmatch(allowed, entry.strip()) for entry in re.split(r"[\[\],]", text)):
            raise ConfigurationError(f"{override} is no {word}: it must be {what}.")


def _find_added(config_name: str, override: str) -> None:
    """Let Hydra find NAME of +GROUP@PACKAGE=NAME, which it looks for beside the primary config."""
    added = re.fullmatch(r"\+(\w+)@[\w.]+=(\w+)", override)
    if added and added[2] in GlobalHydra.instance().config_loader().get_group_options(added[1]):
        beside, node = config_name.rpartition("/")[0], {"defaults": [{f"/{added[1]}@_here_": added[2]}]}
        ConfigStore.instance().store(group=f"{beside}/{added[1]}", name=added[2], node=node)


def _part(override: str) -> str | None:
    """Return the part of a task that an override is short for, or None."""
    match = re.match(rf"\+{{0,2}}({'|'.join(PARTS)})(\.[\w.]+)?=", override)
    return match[1] if match else None


def _long(override: str, task: str) -> str:
    sign, key, value = re.fullmatch(r"(\+{0,2})([\w.]+)=(.*)", override, re.DOTALL).groups()  # type: ignore[union-attr]
    if key in ("data", "model"):  # config groups
        return f"{sign}{key}@tasks.{task}.{key}={value}"
    return f"{sign}tasks.{task}.{key}={value}"


def _composed(config_name: str, overrides: Sequence[str]) -> DictConfig | None:
    try:
        config = compose(config_name, [o for o in overrides if not o.startswith("hydra")])
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException):
        return None
    return config
