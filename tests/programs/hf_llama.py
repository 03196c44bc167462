"""Hugging Face's Llama from a small configuration, which ships its own tensor-parallel plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

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


def experiment(layers: int = 4, lr: float = 0.3, batch: int = 7, steps: int = 20) -> Experiment:
    """A language model."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return Experiment(
        model=lambda: LlamaForCausalLM(config),
        train=phrases(40, seed=0),
        evals={"val": phrases(9, seed=1)},
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        batch=batch,
        steps=steps,
        clip=0.2,
        seed=3,
    )
