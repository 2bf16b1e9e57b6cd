"""Six learning coefficients that are not to be used, one that is, and what each looks like: docs/bad_traces.png.

python docs/bad_traces.py draws it. Each is the same small network with one setting wrong; `problems` names it.
A test says when this file, or one that it imports, has changed since.
"""

from __future__ import annotations

import copy
import json
import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image, PngImagePlugin
from torch import nn

from curvlab.lab.reporting import plots
from curvlab.sampling import LLC, choose_sgld_settings, estimate_llc
from curvlab.training import train

WORDS = {  # of each bad case, what its problems say
    "step too large": "step",
    "burn-in too short": "moves",
    "step too small, few draws": "mixed",
    "not at a minimum": "falls below the start",
    "localization too strong": "localization",
    "localization too weak": "too few draws",
}


def cases() -> Iterator[tuple[str, LLC]]:
    """Yield the name and the estimate of the good case and of six bad ones."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(600, 10, generator=generator)
    targets = (inputs[:, :3] + 0.8 * torch.randn(600, 3, generator=generator)).argmax(1)
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(10, 4), nn.Tanh(), nn.Linear(4, 3)), nn.CrossEntropyLoss()
    start = copy.deepcopy(model)
    data = (inputs, targets)
    train(model, loss, data, num_epochs=150, batch_size=60, lr=0.3, generator=generator, progress=False)
    batches: dict[str, Any] = {"batch_size": 100, "num_burnin_steps": 400, "generator": 0, "progress": False}
    good = choose_sgld_settings(model, loss, data, **batches)
    enough = {"num_chains": 4, "num_draws": 600, **batches}

    def estimate(network: nn.Module = model, *, step: float = 1.0, hold: float = 1.0, **changes: Any) -> LLC:
        chosen = replace(good, step_size=step * good.step_size, localization=hold * good.localization)
        return estimate_llc(network, loss, data, settings=chosen, **enough | changes)

    yield "as it should be", estimate()
    yield "step too large", estimate(step=30)
    yield "burn-in too short", estimate(num_burnin_steps=1, step=0.05)
    yield "step too small, few draws", estimate(step=0.02, num_draws=40)
    yield "not at a minimum", estimate(start)
    yield "localization too strong", estimate(hold=1e4, step=0.01)
    yield "localization too weak", estimate(hold=1e-4, step=0.2)


def made_by() -> str:
    """Return hashes of this file and of those that it imports, as the notebooks keep them."""
    own, here = runpy.run_path(str(Path(__file__).parents[1] / "notebooks" / "run.py")), Path(__file__)
    code = own["what_runs"](here)
    return json.dumps(own["made_by"](code.decode()) | {here.name: own["hash_of"](code)})


if __name__ == "__main__":
    found = list(cases())
    drawing, axes = plots.figure(2, 4, panel_size=(2.2, 2.0))
    for ax, (name, llc) in zip(axes.flat, found, strict=False):
        losses = torch.cat([llc.burnin_losses, llc.losses], dim=1).unfold(1, 25, 1).mean(2)  # of 25 steps in a row
        ax.plot(losses.T, linewidth=0.9)
        ax.axhline(llc.initial_loss, color="black", linestyle=":", linewidth=1)
        ax.axvline(llc.burnin_losses.shape[1], color="#555555", linestyle="--", linewidth=1)
        ax.set_title(name, fontsize=9)
        print(name, llc, *llc.problems, sep="\n  ")
    axes.flat[-1].remove()
    drawing.supxlabel("step", fontsize=9)
    drawing.supylabel("loss (nats)", fontsize=9)
    path = Path(__file__).with_suffix(".png")
    plots.write_png(drawing, path)
    kept = PngImagePlugin.PngInfo()
    kept.add_text("made_by", made_by(), zip=True)
    Image.open(path).save(path, optimize=True, pnginfo=kept)
