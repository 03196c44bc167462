"""Hugging Face's T5 from a small configuration: encoder and decoder, a shared embedding, inputs of uneven lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from meshrun import Experiment, Loss, token_cross_entropy


def loss(outputs: Any, targets: Tensor) -> Loss:
    return token_cross_entropy(outputs.logits, targets)


def pairs(length: int, seed: int) -> list[tuple[dict[str, Tensor], Tensor]]:
    """The task is to say the first words of a text again; texts and answers are padded."""
    tokens = torch.randint(2, 32, (length, 8), generator=torch.Generator().manual_seed(seed))
    found = []
    for number, text in enumerate(tokens):
        mask = (torch.arange(8) < 8 - number % 5).long()
        labels = text[:6].clone()
        labels[6 - number % 4 :] = -100
        before = torch.cat([torch.zeros(1, dtype=torch.long), text[:5]])
        found.append(({"input_ids": text * mask, "attention_mask": mask, "decoder_input_ids": before}, labels))
    return found


def model(config: T5Config) -> nn.Module:
    """Without the dropout inside its attention, which is drawn in a function, where no mesh can make it the same."""
    made = T5ForConditionalGeneration(config)
    for module in made.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return made


def experiment(layers: int = 2, lr: float = 0.05, batch: int = 7, steps: int = 20) -> Experiment:
    """A sequence-to-sequence model; `layers` are those of the encoder, and of the decoder."""
    config = T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=0.1,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return Experiment(
        model=lambda: model(config),
        train=pairs(40, seed=0),
        evals={"val": pairs(9, seed=1)},
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        batch=batch,
        steps=steps,
        clip=0.5,
        seed=3,
    )
