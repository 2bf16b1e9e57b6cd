"""What was typed: the target and its overrides, and the names that follow from them."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf, open_dict

# Overrides that change where and how a run works, not which numbers it finds.
_NEUTRAL = re.compile(
    r"(preset|force|progress|device|tracker(\..*)?|(store|results|data)\.root|hydra[./].*)(@.*)?", re.ASCII
)
_MAX_LENGTH = 80


@dataclass(frozen=True)
class Command:
    """A target's command line.

    Args:
        make_target: name in the Makefile, e.g. "lissa-fig1"; "" for a config made by hand.
        module: what `python -m` runs, e.g. "experiments.lissa.fig1".
        overrides: as typed, e.g. ("preset=laptop", "model=lenet").
    """

    make_target: str = ""
    module: str = ""
    overrides: tuple[str, ...] = ()

    @classmethod
    def of(cls, cfg: DictConfig) -> Command:
        """Return the command that `attach` put into `cfg`; an empty one for a config made by hand."""
        command = OmegaConf.select(cfg, "command")
        if command is None:
            return cls()
        return cls(str(command.make_target), str(command.module), tuple(command.overrides))

    def attach(self, cfg: DictConfig) -> DictConfig:
        """Put the command into `cfg` under `command`, and return `cfg`."""
        with open_dict(cfg):
            cfg.command = {
                "make_target": self.make_target,
                "module": self.module,
                "overrides": list(self.overrides),
            }
        return cfg

    @property
    def changes(self) -> tuple[str, ...]:
        """The overrides that change the numbers, sorted; of several for one key, the last."""
        last = {_key(override): override for override in self.overrides}
        return tuple(sorted(override for key, override in last.items() if not _NEUTRAL.fullmatch(key)))

    def folder_name(self, preset: str) -> str:
        """Return `preset`, or e.g. "laptop+damping=0.1,model=lenet" for a variation of it.

        A variation never shares its folder with the published result: a name that had to be shortened or
        cleaned ends in a hash of the overrides.
        """
        if not self.changes:
            return preset
        typed = ",".join(self.changes)
        clean = re.sub(r"[^A-Za-z0-9_.,=~+-]", "_", typed)
        name = f"{preset}+{clean}"
        if clean == typed and len(name) <= _MAX_LENGTH:
            return name
        suffix = f"-{hashlib.sha256(typed.encode()).hexdigest()[:8]}"
        return name[: _MAX_LENGTH - len(suffix)] + suffix

    def make_line(self, preset: str) -> str:
        """Return e.g. `make lissa-fig1 PRESET=laptop ARGS="model=lenet"`; "" for a config made by hand."""
        if not self.make_target:
            return ""
        line = f"make {self.make_target} PRESET={preset}"
        arguments = _joined(self.changes).replace("$", "$$")
        if not arguments:
            return line
        quoted = shlex.quote(arguments) if re.search(r'["$`\\!]', arguments) else f'"{arguments}"'
        return f"{line} ARGS={quoted}"

    def python_line(self, preset: str) -> str:
        """Return e.g. `python -m experiments.lissa.fig1 preset=laptop`; "" for a config made by hand."""
        if not self.module:
            return ""
        return f"python -m {self.module} {_joined([f'preset={preset}', *self.changes])}"


def _key(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~")


def _joined(overrides: Sequence[str]) -> str:
    return " ".join(shlex.quote(override) for override in overrides)
