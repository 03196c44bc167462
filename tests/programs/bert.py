"""Hugging Face's BERT from a small configuration: some words of each sentence are hidden and have to be found."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from meshrun import Experiment, Loss, token_cross_entropy


def loss(outputs: Any, targets: Tensor) -> Loss:
    return token_cross_entropy(outputs.logits, targets)


def sentences(length: int, seed: int) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Padded sentences; token 1 stands for a hidden word, and only hidden words count."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, 32, (length, 8), generator=generator)
    tokens[:, 1::2] = tokens[:, ::2]
    hidden = torch.rand(length, 8, generator=generator) < 0.4
    found = []
    for number in range(length):
        mask = (torch.arange(8) < 8 - number % 4).long()
        targets = torch.where(hidden[number] & (mask == 1), tokens[number], -100)
        shown = torch.where(hidden[number], 1, tokens[number]) * mask
        found.append(({"input_ids": shown, "attention_mask": mask}, targets))
    return found


def experiment(layers: int = 4, lr: float = 0.1, batch: int = 7, steps: int = 20) -> Experiment:
    """A masked language model."""
    config = BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=8,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.0,  # drawn inside a function, where no mesh can make it the same
    )
    return Experiment(
        model=lambda: BertForMaskedLM(config),
        train=sentences(40, seed=0),
        evals={"val": sentences(9, seed=1)},
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        batch=batch,
        steps=steps,
        clip=0.2,
        seed=3,
    )
