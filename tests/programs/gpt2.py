"""Hugging Face's GPT-2 from a small configuration: tied embeddings, and dropout but inside the attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from meshrun import Experiment, Loss, token_cross_entropy


def loss(outputs: Any, targets: Tensor) -> Loss:
    return token_cross_entropy(outputs.logits, targets)


def phrases(length: int, seed: int) -> list[tuple[dict[str, Tensor], Tensor]]:
    """The last tokens of some phrases do not count."""
    tokens = torch.randint(0, 32, (length, 9), generator=torch.Generator().manual_seed(seed))
    tokens[:, 1::2] = (tokens[:, 0:-1:2] * 5 + 3) % 32
    targets = tokens[:, 1:].clone()
    for number in range(length):
        targets[number, 8 - number % 4 :] = -100
    return [({"input_ids": tokens[i, :-1]}, targets[i]) for i in range(length)]


def experiment(layers: int = 4, lr: float = 0.1, batch: int = 7, steps: int = 20) -> Experiment:
    """A language model."""
    config = GPT2Config(
        vocab_size=32,
        n_positions=8,
        n_embd=16,
        n_layer=layers,
        n_head=4,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.0,  # drawn inside a function, where no mesh can make it the same
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return Experiment(
        model=lambda: GPT2LMHeadModel(config),
        train=phrases(40, seed=0),
        evals={"val": phrases(9, seed=1)},
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        batch=batch,
        steps=steps,
        clip=0.2,
        seed=3,
    )
