"""Where targets that have not moved yet look for `experiments.shared.language_tasks`."""

from experiments.shared.language_tasks import build_language_task, perplexities

__all__ = ["build_language_task", "perplexities"]
