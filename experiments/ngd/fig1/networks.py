"""The networks of Fig. 1: the model of each task at every width."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig

from curvlab.lab import Run, task_label, task_settings
from experiments.ngd.task import Task, load_task

PLACE = ("task", "width")  # the columns that tell the networks apart


@dataclass(frozen=True)
class Network:
    """One network with its settings.

    Attributes:
        label: of its task.
        width: of every hidden layer; 0: the task's model as it is.
        task: data and model.
        settings: of the task.
    """

    label: str
    width: int
    task: Task
    settings: DictConfig

    @property
    def place(self) -> dict[str, str | int]:
        """Where it stands in the tables."""
        return {"task": self.label, "width": self.width}


def networks(run: Run, cfg: DictConfig) -> list[Network]:
    """Return the networks of all tasks.

    Raises:
        ValueError: a width of `tuned_and_matched` or `cutoffs` is not among the task's widths.
    """
    found = []
    for name, settings in task_settings(cfg).items():
        for part in ("tuned_and_matched", "cutoffs"):
            if missing := [width for width in settings[part].widths if width not in settings.widths]:
                raise ValueError(
                    f"{part}.widths of {name} has {missing}, not among its widths: choose of "
                    f"{list(settings.widths)}"
                )
        for width in settings.widths:
            model = settings.model.copy()
            if width:
                model.hidden_sizes = [width] * len(model.hidden_sizes)
            task = load_task(run, settings.data, model, f"{settings.seed_name}, width {width}")
            found.append(Network(task_label(name), width, task, settings))
    return found


def network_name(task: str, width: int) -> str:
    """Return "ffnn-1-layer-digits-width-16", or the task's label where its model is as it is."""
    return f"{task}-width-{width}" if width else task
