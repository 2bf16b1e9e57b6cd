"""The networks that bench-attribution scores, in plain PyTorch.

Nothing of this repository is imported: the peers' environments have none of it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, nn

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh}


class LanguageModel(nn.Module):
    """Logits of an OPT or a GPT-2 with the classes second, (B, T) -> (B, V, T).

    `nn.CrossEntropyLoss` of them is the mean over tokens, and of sequences of one length over sequences. OPT's
    feed-forward layers get the tokens of all sequences as one list, in which a peer's gradients by example cannot
    tell the sequences apart: here each stays one.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model: nn.Module = model
        self._sequences = _Sequences()
        for layer in model.model.decoder.layers if model.config.model_type == "opt" else ():
            layer.fc1 = nn.Sequential(self._sequences, layer.fc1)
            layer.fc2 = nn.Sequential(layer.fc2, nn.Flatten(0, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        self._sequences.length = tokens.shape[1]
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits.transpose(1, 2)


class _Sequences(nn.Module):
    """A list of tokens as sequences again, (B·T, D) -> (B, T, D)."""

    length = 1

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.unflatten(0, (-1, self.length))


def build(stored: dict[str, Any]) -> nn.Module:
    """Return the network that a description stands for, with its weights, in eval mode.

    Args:
        stored: `parameters`, in the order of the modules, and one description: `opt`, the config of a transformers
            OPT, or `gpt2`, that of a GPT-2; `channels` and `sizes`, convolutions and the linear layer behind them;
            `sizes` alone, an MLP.

    Raises:
        ValueError: where a weight has another shape than the description says.
    """
    if "opt" in stored or "gpt2" in stored:
        model = _language_model(stored)
    elif "channels" in stored:
        model = _convnet(stored["channels"], stored["sizes"], stored["activation"])
    else:
        model = _mlp(stored["sizes"], stored.get("activation", "relu"))
    for (name, parameter), value in zip(model.named_parameters(), stored["parameters"], strict=True):
        if parameter.shape != value.shape:
            raise ValueError(f"{name} has shape {tuple(parameter.shape)}, its stored weight {tuple(value.shape)}")
        parameter.data = value.clone()
    return model.eval()


def reached(model: nn.Module, *kinds: type[nn.Module]) -> str:
    """Say which of the parameters lie in layers of these kinds; nothing where all do."""
    layers = [module for module in model.modules() if isinstance(module, kinds)]
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    own, every = (sum(parameter.numel() for parameter in some) for some in (inside, list(model.parameters())))
    if own == every:
        return ""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    tied = ", of the embedding tied to the head what passes the head" if inside & embeddings else ""
    return f"of the {' and '.join(kind.__name__ for kind in kinds)} layers: {own} of {every} parameters{tied}"


def _mlp(sizes: list[int], activation: str) -> nn.Module:
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])


def _convnet(channels: list[int], sizes: list[int], activation: str) -> nn.Module:
    """Return `curvlab.lab.models.ConvNet`, as one sequence."""
    fan_in, num_outputs = sizes
    layers: list[nn.Module] = []
    for before, after in pairwise(channels):
        layers += [nn.Conv2d(before, after, 3, padding=1), ACTIVATIONS[activation](), nn.AvgPool2d(2)]
    return nn.Sequential(*layers[:-1], nn.Flatten(), nn.Linear(fan_in, num_outputs))


def _language_model(stored: dict[str, Any]) -> nn.Module:
    import transformers

    kind = transformers.OPTConfig if "opt" in stored else transformers.GPT2Config
    config = kind(**stored[kind.model_type], attn_implementation="eager")
    return LanguageModel(transformers.AutoModelForCausalLM.from_config(config))
