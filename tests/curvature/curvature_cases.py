"""Every kind of layer and of loss, with a few examples each; P < 250 except for the language models' classes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_EXAMPLES, NUM_OUTPUTS, VOCABULARY = 5, 3, 6


class Attention(nn.Module):
    """One pre-norm block; `fused=False` asks for the attention weights and so avoids the fused kernels."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, NUM_OUTPUTS)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        attended, _ = self.attention(y, y, y, need_weights=not self.fused)
        return self.head((x + attended).mean(1))


class CausalAttention(nn.Module):
    """F.scaled_dot_product_attention called directly."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.head = nn.Linear(4, NUM_OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2, 6)).transpose(1, 2).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(attended.transpose(1, 2).flatten(2)[:, -1])


class TiedLanguageModel(nn.Module):
    """Tokens (N, T) -> (N, T, V): running mean of embeddings, a tanh layer, the embedding as output weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.hidden = nn.Linear(4, 4)
        self.output = nn.Linear(4, VOCABULARY)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        positions = torch.arange(1, tokens.shape[1] + 1, dtype=embedded.dtype)[:, None]
        return self.output(torch.tanh(self.hidden(embedded.cumsum(1) / positions)))


class TiedClassifier(TiedLanguageModel):
    """Tokens (N, T) -> (N, 3): the last token's first three logits."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)[:, -1, :NUM_OUTPUTS]


class Recurrent(nn.Module):
    """One layer used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)
        self.head = nn.Linear(4, NUM_OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x))
        return self.head(x)


class Unused(nn.Module):
    """A parameter before the others that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(2))
        self.inner = mlp(nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def mlp(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), activation, nn.Linear(5, 4), activation, nn.Linear(4, NUM_OUTPUTS))


def partly_frozen() -> nn.Module:
    model = mlp(nn.Tanh())
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def convolutional(*, batch_norm: bool) -> nn.Module:
    norm = [nn.BatchNorm2d(2)] if batch_norm else []
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), *norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)
    )


def normal(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(NUM_EXAMPLES, *shape, dtype=torch.float64, generator=generator)


def tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(VOCABULARY, (NUM_EXAMPLES, 4), generator=generator)


@dataclass(frozen=True)
class ModelCase:
    name: str
    build: Callable[[], nn.Module] = field(repr=False)
    inputs: Callable[[torch.Generator], Tensor] = field(repr=False)
    smooth: bool = True


MODELS = [
    ModelCase("linear", lambda: nn.Linear(4, NUM_OUTPUTS), normal(4)),
    ModelCase("mlp_tanh", lambda: mlp(nn.Tanh()), normal(4)),
    ModelCase("mlp_gelu", lambda: mlp(nn.GELU()), normal(4)),
    ModelCase("mlp_relu", lambda: mlp(nn.ReLU()), normal(4), smooth=False),
    ModelCase("conv", lambda: convolutional(batch_norm=False), normal(1, 4, 4), smooth=False),
    ModelCase("conv_batch_norm", lambda: convolutional(batch_norm=True), normal(1, 4, 4), smooth=False),
    ModelCase("layer_norm", lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)), normal(4)),
    ModelCase("attention", lambda: Attention(fused=False), normal(3, 4)),
    ModelCase("attention_fused", lambda: Attention(fused=True), normal(3, 4)),
    ModelCase("attention_causal", CausalAttention, normal(3, 4)),
    ModelCase("tied", TiedClassifier, tokens),
    ModelCase("recurrent", Recurrent, normal(4)),
    ModelCase("unused", Unused, normal(4)),
    ModelCase("frozen", partly_frozen, normal(4)),
]

CLASSES = torch.tensor([0, 2, 1, 1, 0])
SOME_IGNORED = torch.tensor([0, -1, 1, 2, -1])
BINARY = torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0], [0, 1, 0]], dtype=torch.float64)
REAL = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(5, 3)

LOSSES: dict[str, tuple[nn.Module, Tensor]] = {
    "ce": (nn.CrossEntropyLoss(), CLASSES),
    "ce_sum": (nn.CrossEntropyLoss(reduction="sum"), CLASSES),
    "ce_smoothing": (nn.CrossEntropyLoss(label_smoothing=0.2), CLASSES),
    "ce_ignore": (nn.CrossEntropyLoss(ignore_index=-1), SOME_IGNORED),
    "ce_all": (nn.CrossEntropyLoss(ignore_index=-1, label_smoothing=0.2, reduction="sum"), SOME_IGNORED),
    "mse": (nn.MSELoss(), REAL),
    "mse_sum": (nn.MSELoss(reduction="sum"), REAL),
    "bce": (nn.BCEWithLogitsLoss(), BINARY),
    "bce_sum": (nn.BCEWithLogitsLoss(reduction="sum"), BINARY),
}

LABELLED = torch.tensor(  # the third sequence is ignored altogether
    [[1, 2, 3, 4], [-100, 5, -100, 1], [-100, -100, -100, -100], [0, 0, 2, -100], [-100, -100, -100, 3]]
)
LANGUAGE_LOSSES: dict[str, nn.Module] = {
    "mean": nn.CrossEntropyLoss(),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "smoothing": nn.CrossEntropyLoss(label_smoothing=0.1),
}


def randomised(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """Give every parameter and running statistic a non-trivial value; fp64, eval mode."""
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.6 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.copy_(0.5 + torch.rand(buffer.shape, dtype=torch.float64, generator=generator))
    return model


@dataclass(frozen=True)
class Problem:
    """What an operator is built from: `operator(*problem)`."""

    model: nn.Module
    loss: nn.Module
    inputs: Tensor
    targets: Tensor

    def __iter__(self):
        return iter((self.model, self.loss, (self.inputs, self.targets)))

    def part(self, n: int) -> "Problem":
        """Example n alone."""
        return Problem(self.model, self.loss, self.inputs[n : n + 1], self.targets[n : n + 1])


def problem(case: ModelCase | str, loss: str) -> Problem:
    if isinstance(case, str):
        case = next(model for model in MODELS if model.name == case)
    generator = torch.Generator().manual_seed(sum(case.name.encode()))
    return Problem(randomised(case.build(), generator), LOSSES[loss][0], case.inputs(generator), LOSSES[loss][1])


def language_problem(loss: str) -> Problem:
    generator = torch.Generator().manual_seed(5)
    return Problem(randomised(TiedLanguageModel(), generator), LANGUAGE_LOSSES[loss], tokens(generator), LABELLED)


@cache
def fitted() -> Problem:
    """A small network on 150 points of three classes, fitted until a few points hold the curvature."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(150) % 3
    inputs = 2 * torch.eye(3).double()[targets] + 0.5 * torch.randn(150, 3, generator=generator).double()
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(250):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return Problem(model, nn.CrossEntropyLoss(), inputs, targets)


def all_problems() -> dict[str, Callable[[], Problem]]:
    """Every model with the two main losses, two models with every loss, the language model with its own."""
    pairs = [(m, loss) for m in MODELS for loss in LOSSES if loss in ("ce", "mse") or m.name in ("linear", "conv")]
    vision = {f"{m.name}-{loss}": (lambda m=m, loss=loss: problem(m, loss)) for m, loss in pairs}
    language = {f"language-{loss}": (lambda loss=loss: language_problem(loss)) for loss in LANGUAGE_LOSSES}
    return vision | language
