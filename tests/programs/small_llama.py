"""The recipe's Llama, small enough for a test, with dropout and ragged numbers of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from meshrun import Experiment, token_cross_entropy
from meshrun.recipes.llama import PLAN, Llama, Shape, segments

SHAPE = Shape(32, 16, layers=4, heads=4, kv_heads=2, ffn=32, context=8, dropout=0.1)


def phrases(length: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Each token follows from the one before it; the last ones of some phrases do not count."""
    tokens = torch.randint(0, 32, (length, 9), generator=torch.Generator().manual_seed(seed))
    tokens[:, 1::2] = (tokens[:, 0:-1:2] * 5 + 3) % 32
    targets = tokens[:, 1:].clone()
    for number in range(length):
        targets[number, 8 - number % 4 :] = -100
    return list(zip(tokens[:, :-1], targets, strict=True))


def experiment(lr: float = 0.5, batch: int = 7, steps: int = 20, tied: bool = False) -> Experiment:
    """A language model of four blocks."""
    shape = Shape(**{**vars(SHAPE), "tied": tied})
    return Experiment(
        model=lambda: Llama(shape),
        train=phrases(40, seed=0),
        evals={"val": phrases(9, seed=1)},
        loss=token_cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        batch=batch,
        steps=steps,
        clip=0.2,
        seed=3,
        segments=segments,
        tensor_plan=None if tied else PLAN,
    )
