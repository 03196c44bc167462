"""A classifier around torch's own nn.TransformerEncoder, with padding masks and dropout everywhere."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshrun import Experiment, accuracy, cross_entropy


class Classifier(nn.Module):
    """Tokens (N, T) and which of them are padding, to three classes."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.places = nn.Parameter(torch.randn(8, 16))
        block = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        x = self.encoder(self.embed(tokens) + self.places, src_key_padding_mask=padding)
        kept = (~padding).unsqueeze(-1).to(x.dtype)
        return self.head((x * kept).sum(1) / kept.sum(1))


def sentences(length: int, seed: int) -> list[tuple[tuple[Tensor, Tensor], Tensor]]:
    """The class is that of the first token; sentences have two to eight tokens."""
    tokens = torch.randint(0, 24, (length, 8), generator=torch.Generator().manual_seed(seed))
    words = torch.arange(length) % 7 + 2
    padding = torch.arange(8) >= words[:, None]
    return [((tokens[i], padding[i]), tokens[i, 0] % 3) for i in range(length)]


def experiment(layers: int = 4, lr: float = 0.1, batch: int = 7, steps: int = 20) -> Experiment:
    """Sentences in three classes."""
    return Experiment(
        model=lambda: Classifier(layers),
        train=sentences(40, seed=0),
        evals={"val": sentences(9, seed=1)},
        metrics={"accuracy": accuracy},
        loss=cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        batch=batch,
        steps=steps,
        clip=0.2,
        seed=3,
    )
