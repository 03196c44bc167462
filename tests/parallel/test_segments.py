"""The modules that a model applies in order: found where it is built of like blocks, refused where they cannot be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from meshrun import UserError
from meshrun.parallel.segments import find
from tests.programs import bert, encoder, gpt2, hf_llama, small_llama, t5


class Block(nn.Module):
    """A layer and its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.layer(x))


class Blocks(nn.Module):
    """Blocks in a list, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def numbered(prefix: str, count: int) -> list[str]:
    return [f"{prefix}.{number}" for number in range(count)]


FOUND: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a Sequential": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), ["0", "1", "2"]),
    "a list of blocks": (Blocks, numbered("blocks", 3)),
    "blocks inside another module": (lambda: nn.ModuleDict({"body": Blocks()}), numbered("body.blocks", 3)),
    "a list of plain layers": (lambda: nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))}), []),
    "a list of one block": (lambda: nn.ModuleDict({"layers": nn.ModuleList([Block()])}), []),
    "a list of unlike blocks": (
        lambda: nn.ModuleDict({"layers": nn.ModuleList([Block(), Blocks()])}),
        ["layers.1.blocks.0", "layers.1.blocks.1", "layers.1.blocks.2"],
    ),
    "one layer": (lambda: nn.Linear(3, 2), []),
    "nn.TransformerEncoder": (encoder.experiment().model, numbered("encoder.layers", 4)),
    "nn.Transformer": (
        lambda: nn.Transformer(8, 2, 2, 3, 16, batch_first=True),
        numbered("encoder.layers", 2) + numbered("decoder.layers", 3),
    ),
    "GPT-2": (gpt2.experiment().model, numbered("transformer.h", 4)),
    "Hugging Face's Llama": (hf_llama.experiment().model, numbered("model.layers", 4)),
    "T5": (t5.experiment().model, numbered("encoder.block", 2) + numbered("decoder.block", 2)),
    "BERT": (bert.experiment().model, numbered("bert.encoder.layer", 4)),
}


@pytest.mark.parametrize("name", FOUND)
def test_like_blocks_are_found(name: str):
    make, wanted = FOUND[name]
    with torch.device("meta"):
        model = make()
    assert find(model, None) == wanted


def test_the_users_own_are_taken_in_their_order():
    model = small_llama.experiment().model()
    names = find(model, small_llama.segments)
    assert names == ["embed", *numbered("blocks", 4), "norm", "head"]
    assert find(Blocks(), lambda m: [m.head, m.embed]) == ["head", "embed"]


REFUSED: dict[str, tuple[Callable[[nn.Module], Sequence[nn.Module]], str]] = {
    "a module of another model": (
        lambda _: [nn.Linear(4, 4)],
        r"segments\(model\)\[0\] is a Linear that is not a part",
    ),
    "the model itself": (lambda m: [m], r"segments\(model\)\[0\] is a Blocks that is not a part of the model"),
    "no module": (lambda m: [m.embed, m.head.weight], r"segments\(model\)\[1\] is a Parameter that is not a part"),
    "one twice": (lambda m: [m.embed, m.embed], r"segments\(model\) names 'embed' twice"),
    "one inside another": (lambda m: [m.blocks[0], m.blocks[0].norm], r"'blocks.0.norm' is part of 'blocks.0'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_segments_is_refused_in_a_sentence(name: str):
    said, sentence = REFUSED[name]
    with pytest.raises(UserError, match=sentence):
        find(Blocks(), said)


def test_segments_that_are_no_list_are_refused():
    with pytest.raises(UserError, match=r"segments\(model\) returned NoneType; it must return a list of modules"):
        find(Blocks(), lambda _: None)
