"""Sequences cut over ranks: what is cut, what attention becomes, and models that compute what one process does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from meshrun import UserError
from meshrun.parallel import cp, ring
from meshrun.parallel.cp import attention, positional, split, with_positions
from tests.parallel.test_ring import Staged

HUGGING_FACE = find_spec("transformers") is not None
if HUGGING_FACE:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

CAUSAL = "cp works for causal self-attention through scaled_dot_product_attention"
WORDS = 20


class Decoder(nn.Module):
    """A small causal transformer with learned positions; recomputes its block where asked to."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.recompute, self.reentrant = recompute is not None, bool(recompute)
        self.words, self.places = nn.Embedding(WORDS, 16), nn.Embedding(64, 16)
        self.heads, self.mix = nn.Linear(16, 48), nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        self.out = nn.Linear(16, WORDS)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden = self.words(tokens) + self.places(positions)
        for _ in range(2):
            if self.recompute:
                hidden = checkpoint(self.block, hidden, use_reentrant=self.reentrant)
            else:
                hidden = self.block(hidden)
        return self.out(hidden)

    def block(self, hidden: Tensor) -> Tensor:
        query, key, value = self.heads(hidden).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return hidden + self.mix(seen.transpose(1, 2).flatten(2))


def sequences(length: int = 24) -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    words = torch.randint(WORDS, (2, length + 1))
    return words[:, :-1], words[:, 1:]


def loss_of(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    return logits.detach(), functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def gradients(model: nn.Module) -> list[Tensor]:
    found = [each.grad for each in model.parameters() if each.grad is not None]
    assert len(found) == len(list(model.parameters()))
    return found


def by_grad(model: nn.Module, loss: Tensor) -> None:
    weights = list(model.parameters())
    for weight, grad in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        weight.grad = grad


WAYS: dict[str, Callable[[nn.Module, Tensor], None]] = {
    "backward": lambda _, loss: loss.backward(),
    "autograd.backward": lambda _, loss: torch.autograd.backward([loss], [None]),
    "autograd.grad": by_grad,
}


def assert_ranks_compute_what_one_process_does(
    build: Callable[[], nn.Module],
    plainly: Callable[..., Any],
    way: str = "backward",
    device: str = "cpu",
) -> None:
    """Logits at this rank's positions, and gradients summed over the ranks."""
    inputs, targets = (each.to(device) for each in sequences())
    torch.manual_seed(1)
    model = build().to(device)
    wanted, loss = loss_of(plainly(model, inputs), targets)
    loss.backward()
    wanted_gradients = [each.clone() for each in gradients(model)]
    model.zero_grad()

    group = dist.group.WORLD
    mine, my_targets, positions = split(inputs, targets, dist.get_rank(), dist.get_world_size())
    with attention(group):
        logits, loss = loss_of(model(**with_positions(model, mine, positions)), my_targets)
        WAYS[way](model, loss)
    assert (logits - wanted[:, positions]).abs().max() < 1e-5
    for found, one in zip(gradients(model), wanted_gradients, strict=True):
        total = found.contiguous()
        dist.all_reduce(total)  # gloo does this one for a GPU's tensors too
        assert (total - one).norm() < 1e-5 * one.norm() + 1e-6


def in_place_order(model: nn.Module, tokens: Tensor) -> Any:
    return model(tokens, torch.arange(tokens.shape[1], device=tokens.device))


RANKS = [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 3, 4)]


@pytest.mark.parametrize("n", RANKS)
def test_a_model_computes_what_it_does_in_one_process(n: int):
    assert dist.get_world_size() == n
    assert_ranks_compute_what_one_process_does(Decoder, in_place_order)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "reentrant, way", [*((False, way) for way in WAYS), (True, "backward"), (True, "autograd.backward")]
)
def test_recomputed_activations_call_the_ring_again(reentrant: bool, way: str):
    assert_ranks_compute_what_one_process_does(lambda: Decoder(recompute=reentrant), in_place_order, way)


@pytest.mark.gpu
@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("recompute", [None, False, True])
def test_a_gpu_computes_what_one_process_does(recompute: bool | None):
    """Recomputation runs in a thread of the GPU's there, which must know of the ring too."""
    torch.cuda.set_device(0)
    ring.dist.batch_isend_irecv = lambda ops: [Staged(ops)]
    assert_ranks_compute_what_one_process_does(lambda: Decoder(recompute), in_place_order, device="cuda")


@pytest.mark.ranks(2)
def test_gradients_are_the_same_if_the_backward_pass_runs_outside():
    inputs, targets, positions = split(*sequences(), dist.get_rank(), 2)
    model = Decoder()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    found = []
    for inside in (attention(dist.group.WORLD), nullcontext()):
        model.zero_grad()
        with attention(dist.group.WORLD):
            _, loss = loss_of(model(inputs, positions), targets)
        with inside:
            loss.backward()
        found.append(gradients(model))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def llama() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=WORDS, **sizes, **heads, use_cache=False, attn_implementation="sdpa")
    )


def gpt2() -> nn.Module:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, **sizes, **dropout, use_cache=False, attn_implementation="sdpa")
    )


@pytest.mark.skipif(not HUGGING_FACE, reason="needs transformers")
@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize("n", [RANKS[0], RANKS[2]])
def test_a_hugging_face_model_computes_what_it_does_in_one_process(n: int, build: Callable[[], nn.Module]):
    assert dist.get_world_size() == n
    assert_ranks_compute_what_one_process_does(build, lambda model, tokens: model(input_ids=tokens))


@pytest.mark.skipif(not HUGGING_FACE, reason="needs transformers")
@pytest.mark.ranks(2)
def test_a_hugging_face_model_can_recompute():
    def build() -> nn.Module:
        model = llama()
        model.gradient_checkpointing_enable()
        return model.train()

    assert_ranks_compute_what_one_process_does(build, lambda model, tokens: model(input_ids=tokens))


@pytest.mark.ranks(2)
def test_attention_without_a_batch_and_with_several_batch_dimensions():
    torch.manual_seed(2)
    for lead in ((), (2, 3)):
        whole = torch.randn(3, *lead, 4, 8, 5)
        wanted = functional.scaled_dot_product_attention(*whole, is_causal=True)
        _, _, mine = split(torch.zeros(1, 8), (), dist.get_rank(), 2)
        with attention(dist.group.WORLD):
            out = functional.scaled_dot_product_attention(*whole[..., mine, :], None, 0.0, True)
        torch.testing.assert_close(out, wanted[..., mine, :])


@pytest.mark.ranks(2)
def test_attention_may_be_nested_and_ends_with_its_block():
    torch.manual_seed(2)
    query = torch.randn(1, 2, 8, 4)
    alone = functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    with attention(dist.group.WORLD):
        once = functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        with attention(dist.group.WORLD):
            assert torch.equal(functional.scaled_dot_product_attention(query, query, query, is_causal=True), once)
        assert torch.equal(functional.scaled_dot_product_attention(query, query, query, is_causal=True), once)
    assert not torch.equal(once, alone)
    assert torch.equal(functional.scaled_dot_product_attention(query, query, query, is_causal=True), alone)


REFUSED: dict[str, tuple[dict[str, Any], int]] = {
    "4 queries for 2 keys (cross-attention)": ({"is_causal": True}, 2),
    "an attn_mask": ({"attn_mask": torch.ones(4, 4).bool()}, 4),
    "is_causal=False": ({}, 4),
    "dropout inside it": ({"is_causal": True, "dropout_p": 0.1}, 4),
    "4 queries for 6 keys (cross-attention)": ({"is_causal": True}, 6),
    "dropout inside it and is_causal=False": ({"dropout_p": 0.1}, 4),
}


@pytest.mark.parametrize("met", REFUSED)
def test_other_attention_is_refused_by_what_it_asks_for(met: str):
    options, keys = REFUSED[met]
    query, key = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, keys, 8)
    with pytest.raises(UserError) as error, attention(dist.GroupMember.NON_GROUP_MEMBER):  # type: ignore[arg-type]
        functional.scaled_dot_product_attention(query, key, key, **options)
    assert str(error.value) == (
        f"the model calls scaled_dot_product_attention with {met}, but {CAUSAL} (is_causal=True, no mask, no dropout): "
        f"change the model's attention, or use a layout without cp (--layout)"
    )


@pytest.mark.parametrize(
    ("samples", "heads", "met"),
    [(1, 1, "fewer key heads without enable_gqa"), (3, 2, "queries and keys of different batches")],
)
def test_keys_of_another_shape_are_refused(samples: int, heads: int, met: str):
    query, key = torch.zeros(1, 2, 4, 8), torch.zeros(samples, heads, 4, 8)
    with pytest.raises(UserError, match=met), attention(dist.GroupMember.NON_GROUP_MEMBER):  # type: ignore[arg-type]
        functional.scaled_dot_product_attention(query, key, key, is_causal=True)


@pytest.mark.parametrize("weights", [False, True])
def test_torch_s_multihead_attention_is_refused(weights: bool):
    """Its inner attention is out of sight, and would see the tokens of one rank only."""
    layer, hidden = nn.MultiheadAttention(8, 2), torch.zeros(4, 1, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    with (
        pytest.raises(UserError, match=rf"^the model uses nn\.MultiheadAttention, but {CAUSAL}"),
        attention(dist.GroupMember.NON_GROUP_MEMBER),  # type: ignore[arg-type]
    ):
        layer(hidden, hidden, hidden, attn_mask=mask, is_causal=True, need_weights=weights)


def test_a_tensor_is_cut_along_its_tokens():
    tokens = torch.arange(16).view(2, 8)
    inputs, targets, positions = split(tokens, tokens + 100, part=0, parts=2)
    assert positions.tolist() == [0, 1, 6, 7]
    assert inputs.tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]]
    assert targets.tolist() == [[100, 101, 106, 107], [108, 109, 114, 115]]


def test_of_several_inputs_those_with_tokens_are_cut():
    features, mask, lengths = torch.rand(2, 5), torch.ones(2, 8, 3), torch.tensor([8, 8])
    tokens = torch.arange(16).view(2, 8)
    (cut_features, cut_mask, cut_tokens, same, word), targets, _ = split(
        (features, mask, tokens, lengths, "word"), {"next": tokens}, part=1, parts=2
    )
    assert torch.equal(cut_features, features) and torch.equal(same, lengths) and word == "word"
    assert cut_mask.shape == (2, 4, 3)
    assert cut_tokens.tolist() == targets["next"].tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]


def test_without_token_ids_the_first_input_says_the_length():
    inputs, _, positions = split({"frames": torch.rand(2, 8, 3)}, torch.zeros(2, 8), part=1, parts=2)
    assert inputs["frames"].shape == (2, 4, 3) and positions.tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("shape", [(3,), (3, 5)])
def test_a_target_for_a_whole_sequence_is_refused(shape: tuple[int, ...]):
    with pytest.raises(UserError) as error:
        split(torch.zeros(3, 8).long(), torch.zeros(shape), part=0, parts=2)
    assert str(error.value) == (
        f"targets have the shape {shape} and sequences 8 tokens; cp needs a target for every token, (samples, 8), "
        "or use another layout (--layout)"
    )


def test_a_length_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match="sequences have 129 tokens, which cp=2 cannot cut into 4 equal chunks"):
        split(torch.zeros(1, 129).long(), torch.zeros(1, 129), part=0, parts=2)


def test_inputs_without_sequences_are_refused():
    with pytest.raises(UserError, match="inputs have no second dimension"):
        split(torch.zeros(4), torch.zeros(4), part=0, parts=2)


class Named(nn.Module):
    def forward(self, tokens: Tensor, extra: Any = None, position_ids: Any = None, attention_mask: Any = None) -> None:
        """Takes positions as Hugging Face's models do."""


class Unplaced(nn.Module):
    def forward(self, tokens: Tensor) -> None:
        """Counts its tokens itself."""


def test_the_argument_for_positions_is_found():
    assert positional(Decoder()) == "positions"
    assert positional(Named()) == "position_ids"
    assert positional(Unplaced()) is None


def test_a_model_that_takes_no_positions_is_refused():
    with pytest.raises(UserError) as error:
        with_positions(Unplaced(), torch.zeros(1, 4), torch.arange(4))
    assert str(error.value) == (
        "Unplaced takes no positions; under cp a model must take `positions` or `position_ids` in its forward, "
        "because its tokens are not 0 … T-1 on a rank (--layout)"
    )


def test_positions_join_the_inputs_by_name():
    tokens, places = torch.zeros(3, 4).long(), torch.tensor([0, 1, 6, 7])
    own = with_positions(Decoder(), tokens, places)
    assert own.keys() == {"tokens", "positions"} and own["positions"].tolist() == [0, 1, 6, 7]
    for inputs in ((tokens, "more"), {"tokens": tokens, "extra": "more", "attention_mask": None}):
        named = with_positions(Named(), inputs, places)
        assert named["tokens"] is tokens and named["extra"] == "more"
        assert named["position_ids"].tolist() == [[0, 1, 6, 7]] * 3
        assert named["attention_mask"].tolist() == [[1, 1, 1, 1]] * 3


def test_what_the_user_gives_is_kept():
    tokens, places, mask = torch.zeros(2, 4).long(), torch.tensor([0, 1, 6, 7]), torch.zeros(2, 4)
    assert with_positions(Named(), {"tokens": tokens, "attention_mask": mask}, places)["attention_mask"] is mask
    packed = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])
    named = with_positions(Named(), (tokens, None, packed), places)
    assert named["position_ids"] is packed and "attention_mask" not in named


def test_inputs_that_a_forward_does_not_name_are_refused():
    with pytest.raises(UserError, match="Decoder gets 3 inputs, of which its forward names 2"):
        with_positions(Decoder(), (torch.zeros(1, 4),) * 3, torch.arange(4))


@pytest.mark.parametrize("scale", [None, 0.125])
def test_the_scale_that_a_model_gives_is_that_of_the_ring(scale: float | None, monkeypatch: pytest.MonkeyPatch):
    given: list[float | None] = []

    def ring_of_one(query: Tensor, _key: Tensor, _value: Tensor, _group: Any, scale: float | None) -> Tensor:
        given.append(scale)
        return query

    monkeypatch.setattr(cp, "ring_attention", ring_of_one)
    x = torch.ones(1, 2, 4, 8)
    nothing: Any = None
    with cp.attention(nothing):
        torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True, scale=scale)
    assert given == [scale]


def test_the_sequence_is_that_of_numbers_and_not_of_a_mask():
    inputs = {"mask": torch.ones(2, 3, dtype=torch.bool), "noise": torch.ones(2, 4), "tokens": torch.ones(2, 5).long()}
    assert cp.tokens_of(inputs).shape == (2, 5)
