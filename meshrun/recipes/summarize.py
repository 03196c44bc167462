"""A document in one sentence: an encoder-decoder transformer of the T5 class.

    meshrun run summarize                              # 1.3 million parameters, this process
    meshrun run summarize --procs 2                    # two local processes, the same losses
    meshrun use runs/summarize-1 summarize --text README.md

    meshrun stage summarize                            # where there is internet: XSum, and t5-small
    meshrun run summarize --weights t5-small           # go on from it, on news articles
    meshrun run summarize --preset base --precision bf16

24,555 descriptions of Debian's packages with the one line that sums up each come with the package. XSum's 226,711
articles of the BBC are taken instead once they are staged.

The file has five parts: the model, which is torch and nothing else; writing with it; the data; what a summary is worth;
the experiment, and weights of Hugging Face.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshrun import Experiment, Schedule, Stage, Table, UserError, padded, staged, token_cross_entropy

DATA = Path(__file__).parent / "data" / "summaries.jsonl.gz"
TOKENIZER = DATA.with_name("summaries.tokenizer.json")
PAD, END = 0, 1
"""Tokens of every T5: what fills up short texts, and starts summaries; and what ends documents and summaries."""

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
BEAMS = 4
"""Beginnings of a summary that are followed: the likeliest token each time is often none of the likeliest summary."""


@dataclass(frozen=True)
class Shape:
    """The numbers that make a model."""

    vocabulary: int
    hidden: int
    layers: int
    """Of the encoder."""
    decoder_layers: int
    heads: int
    head_size: int
    ffn: int
    gated: bool = False
    """Whether the feed-forward networks are those of T5 1.1: gated, with GELU."""
    tied: bool = True
    """Whether the head uses the embedding's weights."""
    pointer: bool = False
    """Whether a token can be pointed at in the document, too: small models cannot learn to copy by themselves."""
    buckets: int = 32
    """Of distances between tokens: short ones have their own, longer ones share."""
    furthest: int = 128
    """The distance from which on all are the same."""
    dropout: float = 0.1
    eps: float = 1e-6
    document: int = 512
    """Tokens of a document that are read; the weights do not depend on it."""
    summary: int = 64
    """Tokens of a summary that are learnt from, and written."""


PRESETS = {
    "tiny": Shape(
        4096, 128, 2, 2, heads=4, head_size=32, ffn=256, gated=True, pointer=True, dropout=0.0, document=64, summary=32
    ),
    "small": Shape(32_128, 512, 6, 6, heads=8, head_size=64, ffn=2048),
    "base": Shape(32_128, 768, 12, 12, heads=12, head_size=64, ffn=3072),
    "large": Shape(32_128, 1024, 24, 24, heads=16, head_size=64, ffn=4096),
}

REHEARSAL = {"preset": "tiny", "corpus": "packages", "document": 32, "weights": None}
"""Options of a model that `meshrun rehearse` trains in no time."""


def plan(shape: Shape) -> dict[str, str]:
    """How feed-forward networks are split over tensor-parallel ranks: two thirds of the weights of a block.

    Attention stays whole, since all its blocks share one table of distances with a column for each head.
    """
    styles = {"up": "colwise", "dropout": "features", "down": "rowwise", **({"gate": "colwise"} if shape.gated else {})}
    return {f"{stack}.blocks.*.ffn.{name}": styles[name] for stack in ("encoder", "decoder") for name in styles}


class Linear(nn.Linear):
    """A matrix, without bias, drawn from a normal distribution."""

    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        self.std = std  # before the constructor, which already draws
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """A vector for each number, drawn from a normal distribution."""

    def __init__(self, entries: int, size: int, std: float) -> None:
        self.std = std  # before the constructor, which already draws
        super().__init__(entries, size)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class T5(nn.Module):
    """Documents (N, S), which of their tokens are real, and summaries so far (N, T) to logits (N, T, vocabulary)."""

    words: Words
    """Set by whoever wants texts of it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = Embedding(shape.vocabulary, shape.hidden, 1.0)
        self.encoder = Encoder(shape)
        self.decoder = Decoder(shape)
        self.head = Linear(shape.hidden, shape.vocabulary, 1.0 if shape.tied else shape.hidden**-0.5)
        if shape.tied:
            self.head.weight = self.embed.weight
        self.pointer = Pointer(shape) if shape.pointer else None

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        read = self.encoder(self.embed(input_ids), attention_mask)
        return self.said(decoder_input_ids, read, input_ids, attention_mask)

    def said(self, tokens: Tensor, read: Tensor, document: Tensor, real: Tensor, past: Sequence[Past] = ()) -> Tensor:
        """Logits of what follows the summary's tokens, or only those of which `past` does not know yet."""
        new = tokens[:, past[0].length :] if past else tokens
        states = self.decoder(self.embed(new), read, real, past)
        # The embedding's vectors are long, and T5 makes up for it here.
        logits = self.head(states * self.shape.hidden**-0.5 if self.shape.tied else states)
        return logits if self.pointer is None else self.pointer(logits, states, tokens, read, document, real)

    @torch.no_grad()
    def write(self, input_ids: Tensor, attention_mask: Tensor, most: int, beams: int = BEAMS) -> Tensor:
        """Summaries (N, up to `most`) with no pair of tokens twice; PAD after the END.

        Of each the `beams` likeliest beginnings are followed; means of tokens count, since sums favour short ones.
        """
        read = self.encoder(self.embed(input_ids), attention_mask)
        read, document, real = (each.repeat_interleave(beams, 0) for each in (read, input_ids, attention_mask))
        past = [Past() for _ in self.decoder.blocks]
        tokens = input_ids.new_full((len(document), 1), PAD)
        sums = read.new_zeros(len(input_ids), beams)
        sums[:, 1:] = -math.inf  # they all begin alike
        lengths, ended = torch.zeros_like(sums), torch.zeros_like(sums, dtype=torch.bool)
        first = beams * torch.arange(len(input_ids), device=tokens.device)[:, None]
        while tokens.shape[1] <= most and not ended.all():
            found = self.said(tokens, read, document, real, past)[:, -1].log_softmax(-1)
            row, place = (tokens[:, :-1] == tokens[:, -1:]).nonzero(as_tuple=True)
            found[row, tokens[row, place + 1]] = -math.inf
            found[ended.flatten()] = -math.inf
            found[ended.flatten(), PAD] = 0.0  # what has ended stays as it is
            totals, lengths = sums[..., None] + found.view(*sums.shape, -1), lengths + ~ended
            best = (totals / lengths[..., None]).flatten(1).topk(beams).indices
            beam, token = best // found.shape[-1], best % found.shape[-1]
            sums, lengths = totals.flatten(1).gather(1, best), lengths.gather(1, beam)
            ended = ended.gather(1, beam) | (token == END)
            chosen = (first + beam).flatten()
            tokens = torch.cat([tokens[chosen], token.view(-1, 1)], 1)
            for each in past:
                each.keep(chosen)
        return tokens[::beams, 1:]


class Encoder(nn.Module):
    """Reads: every token of a document may look at all of its real ones."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bias = Distances(shape, both_ways=True)
        self.dropout_in = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(EncoderBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.dropout_out = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        bias = only(real[:, None, None], self.bias(x.shape[1], x.shape[1]))
        x = self.dropout_in(x)
        for block in self.blocks:
            x = block(x, bias)
        return self.dropout_out(self.norm(x))


class Decoder(nn.Module):
    """Writes: every token of a summary may look at those before it, and at the document."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bias = Distances(shape, both_ways=False)
        self.dropout_in = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(DecoderBlock(shape) for _ in range(shape.decoder_layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.dropout_out = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, read: Tensor, real: Tensor, past: Sequence[Past] = ()) -> Tensor:
        new = x.shape[1]
        seen = past[0].length if past else 0
        before = torch.ones(new, seen + new, dtype=torch.bool, device=x.device).tril(seen)
        bias = only(before, self.bias(new, seen + new))
        across = only(real[:, None, None], x.new_zeros(()))
        x = self.dropout_in(x)
        for number, block in enumerate(self.blocks):
            x = block(x, bias, read, across, past[number] if past else None)
        return self.dropout_out(self.norm(x))


class EncoderBlock(nn.Module):
    """Attention, then a feed-forward network, each on normed inputs and added to what came in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.attention = Attention(shape)
        self.attention_dropout = nn.Dropout(shape.dropout)
        self.ffn_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.ffn = GatedFeedForward(shape) if shape.gated else FeedForward(shape)
        self.ffn_dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        found = self.attention(normed, self.attention.keys_and_values(normed), bias)
        x = x + self.attention_dropout(found)
        return x + self.ffn_dropout(self.ffn(self.ffn_norm(x)))


class DecoderBlock(nn.Module):
    """As in the encoder, with attention to the document in between."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.attention = Attention(shape)
        self.attention_dropout = nn.Dropout(shape.dropout)
        self.cross_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.cross = Attention(shape)
        self.cross_dropout = nn.Dropout(shape.dropout)
        self.ffn_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.ffn = GatedFeedForward(shape) if shape.gated else FeedForward(shape)
        self.ffn_dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, bias: Tensor, read: Tensor, across: Tensor, past: Past | None = None) -> Tensor:
        normed = self.attention_norm(x)
        own = self.attention.keys_and_values(normed)
        if past is not None:
            own = past.with_own(own)
        x = x + self.attention_dropout(self.attention(normed, own, bias))
        document = past.document if past is not None else None
        if document is None:
            document = self.cross.keys_and_values(read)
            if past is not None:
                past.document = document
        x = x + self.cross_dropout(self.cross(self.cross_norm(x), document, across))
        return x + self.ffn_dropout(self.ffn(self.ffn_norm(x)))


@dataclass
class Past:
    """Keys and values that a decoder block has computed: of the summary's tokens so far, and of the document."""

    own: tuple[Tensor, ...] | None = None
    document: tuple[Tensor, ...] | None = None

    @property
    def length(self) -> int:
        return 0 if self.own is None else self.own[0].shape[2]

    def with_own(self, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Those so far and those of the next tokens, which are kept from here on."""
        if self.own is not None:
            new = tuple(torch.cat(each, 2) for each in zip(self.own, new, strict=True))
        self.own = new
        return new

    def keep(self, rows: Tensor) -> None:
        """Go on with these summaries, of which each is of the same document as the one in whose place it stands."""
        assert self.own is not None
        self.own = tuple(each[rows] for each in self.own)


class Attention(nn.Module):
    """Attention to keys and values from wherever; what is added to scores comes as a bias (…, queries, keys)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size, inner = shape.head_size, shape.heads * shape.head_size
        # T5 does not divide scores by the square root of the head's size: the queries are drawn smaller instead.
        self.q = Linear(shape.hidden, inner, (shape.hidden * shape.head_size) ** -0.5)
        self.k = Linear(shape.hidden, inner, shape.hidden**-0.5)
        self.v = Linear(shape.hidden, inner, shape.hidden**-0.5)
        self.o = Linear(inner, shape.hidden, inner**-0.5)

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, ...]:
        return self._heads(self.k(x)), self._heads(self.v(x))

    def forward(self, x: Tensor, keys_and_values: tuple[Tensor, ...], bias: Tensor) -> Tensor:
        q, (k, v) = self._heads(self.q(x)), keys_and_values
        # Without cuDNN, whose backward pass gives NaN for some lengths with a mask (torch 2.11, on H100 and H200).
        with sdpa_kernel(KERNELS):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype), scale=1.0)
        return self.o(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        # The number of heads is what the matrices give: a model may hold only some of them.
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class FeedForward(nn.Module):
    """Of T5 1.0."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = Linear(shape.hidden, shape.ffn, shape.hidden**-0.5)
        self.dropout = nn.Dropout(shape.dropout)
        self.down = Linear(shape.ffn, shape.hidden, shape.ffn**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(F.relu(self.up(x))))


class GatedFeedForward(nn.Module):
    """Of T5 1.1: one matrix says how much of the other's outputs passes."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = Linear(shape.hidden, shape.ffn, shape.hidden**-0.5)
        self.up = Linear(shape.hidden, shape.ffn, shape.hidden**-0.5)
        self.dropout = nn.Dropout(shape.dropout)
        self.down = Linear(shape.ffn, shape.hidden, shape.ffn**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(F.gelu(self.gate(x), approximate="tanh") * self.up(x)))


class Distances(nn.Module):
    """What each head adds to a score for how far the key is from the query: (1, heads, queries, keys).

    The queries are the last ones of as many tokens as there are keys.
    """

    def __init__(self, shape: Shape, both_ways: bool) -> None:
        super().__init__()
        self.both_ways, self.furthest = both_ways, shape.furthest
        self.table = Embedding(shape.buckets, shape.heads, shape.hidden**-0.5)

    def forward(self, queries: int, keys: int) -> Tensor:
        place = torch.arange(keys, device=self.table.weight.device)
        ahead = place - place[keys - queries :, None]
        if not self.both_ways:
            bucket = bucketed(-ahead.clamp_max(0), self.table.num_embeddings, self.furthest)
        else:
            half = self.table.num_embeddings // 2
            bucket = bucketed(ahead.abs(), half, self.furthest) + half * (ahead > 0)
        return self.table(bucket).permute(2, 0, 1).unsqueeze(0)


def bucketed(distance: Tensor, buckets: int, furthest: int) -> Tensor:
    """Numbers of buckets: half of them are for the shortest distances, the others grow with the logarithm."""
    exact = buckets // 2
    grown = (distance.clamp_min(1).float() / exact).log() / math.log(furthest / exact) * (buckets - exact)
    return torch.where(distance < exact, distance, (exact + grown.long()).clamp_max(buckets - 1))


def only(allowed: Tensor, bias: Tensor) -> Tensor:
    """A bias after which nothing else can be looked at."""
    return bias.masked_fill(~allowed, -1e9)  # no infinity, also not in bfloat16: kernels divide by what is left


class Pointer(nn.Module):
    """Adds to a token's probability that of pointing at it in the document; not a part of T5.

    A place is the likelier the better the decoder's state fits the encoder's there; and the token after one that was
    just written, or after two of them, is likely anyway: so spans are copied from the first steps of a training on.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.furthest = shape.furthest
        self.q = Linear(shape.hidden, shape.hidden, shape.hidden**-0.5)
        self.k = Linear(shape.hidden, shape.hidden, shape.hidden**-0.5)
        self.places = Embedding(shape.buckets, 1, 0.02)
        self.going_on = GoingOn(shape)

    def forward(
        self, logits: Tensor, states: Tensor, tokens: Tensor, read: Tensor, document: Tensor, real: Tensor
    ) -> Tensor:
        """Logits of both ways together."""
        scores = self.q(states) @ self.k(read).transpose(1, 2) * states.shape[-1] ** -0.5
        place = torch.arange(document.shape[1], device=document.device)
        scores = scores + self.places(bucketed(place, self.places.num_embeddings, self.furthest)).squeeze(-1)
        scores = only(real[:, None], (scores + self.going_on(states, tokens, document)).float())
        logits = logits.float()
        # One softmax over the vocabulary and the document's places; a token gets the sum of its own.
        highest = torch.maximum(logits.amax(-1, keepdim=True), scores.amax(-1, keepdim=True)).detach()
        pointed = (scores - highest).exp()
        sums = (logits - highest).exp().scatter_add(-1, document[:, None].expand_as(pointed), pointed)
        return sums.clamp_min(1e-30).log()


class GoingOn(nn.Module):
    """What pointing at a place gets for following on what was just written: (N, T, S)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Linear(shape.hidden, 2)
        nn.init.constant_(self.weight.bias, 2.0)

    def forward(self, states: Tensor, tokens: Tensor, document: Tensor) -> Tensor:
        same = tokens[:, :, None] == document[:, None]
        one = F.pad(same, (1, 0))[:, :, :-1]
        two = one & F.pad(one, (1, 0, 1, 0))[:, :-1, :-1]
        weight, new = self.weight(states), states.shape[1]
        return one[:, -new:] * weight[..., :1] + two[:, -new:] * weight[..., 1:]


class TransformersT5(nn.Module):
    """The class of the library `transformers`, called in the same way."""

    words: Words

    def __init__(self, shape: Shape, weights: Path | None) -> None:
        super().__init__()
        self.shape = shape
        try:
            from transformers import T5Config, T5ForConditionalGeneration
        except ImportError:
            raise UserError(
                "the library transformers is not installed here; pip install transformers, or take the model of this "
                "file (--model own)"
            ) from None
        if weights is None:
            self.model = T5ForConditionalGeneration(T5Config(**hf_config(shape)))
        else:
            self.model = T5ForConditionalGeneration.from_pretrained(
                weights, local_files_only=True, use_safetensors=True, dropout_rate=shape.dropout, dtype=torch.float32
            )
        for module in self.model.modules():
            # Drawn by a function rather than a module, so that it would be other elements on every mesh.
            if type(module).__name__ == "T5Attention":
                module.dropout = 0.0  # type: ignore[assignment]

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            use_cache=False,
        ).logits
        return logits

    @torch.no_grad()
    def write(self, input_ids: Tensor, attention_mask: Tensor, most: int, beams: int = BEAMS) -> Tensor:
        """As above, but that what has ended takes no beam's place."""
        generate: Any = self.model.generate  # type: ignore[misc]
        asked = {"max_new_tokens": most, "num_beams": beams, "do_sample": False, "no_repeat_ngram_size": 2}
        found: Tensor = generate(input_ids=input_ids, attention_mask=attention_mask, **asked)
        return found[:, 1:]


class Words:
    """Text to tokens, and back."""

    def __init__(self, path: Path, prefix: str = "") -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise UserError(
                "the library tokenizers is not installed here, without which texts cannot become tokens: "
                "pip install tokenizers"
            ) from None
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library has no class of its own for it
            raise UserError(f"{path} is no tokenizer: {error} (--weights)") from None
        self.prefix, self.size = prefix, self._tokenizer.get_vocab_size()
        self.fingerprint = hashlib.sha256(path.read_bytes()).hexdigest()[:16]

    def of(self, text: str, most: int) -> list[int]:
        """The first tokens of a text, the last of them END."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [*found[: most - 1], END]

    def of_document(self, text: str, most: int) -> list[int]:
        return self.of(self.prefix + " ".join(text.split()), most)

    def text(self, tokens: Sequence[int]) -> str:
        found: str = self._tokenizer.decode([each for each in tokens if each not in (PAD, END)])
        return found.strip()


class Pairs:
    """Documents and their summaries as tokens: the rows of a table that belong to a split."""

    draws = False

    def __init__(self, table: Table, rows: NDArray[np.int64], words: Words, shape: Shape) -> None:
        self.table, self.rows, self.words, self.shape = table, rows, words, shape
        meant = (table.fingerprint, words.fingerprint, words.prefix, shape.document, shape.summary)
        self.fingerprint = hashlib.sha256(repr(meant).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, ids: Sequence[int]) -> list[tuple[dict[str, Tensor], Tensor]]:
        return [self._sample(row) for row in self.texts(ids)]

    def texts(self, ids: Sequence[int]) -> list[dict[str, str]]:
        """The documents and summaries themselves."""
        found: list[dict[str, str]] = self.table.__getitems__(self.rows[np.asarray(ids, np.int64)])
        return found

    def lengths(self, ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """About the tokens of each document: of bytes there are four a token."""
        return np.minimum(self.table.lengths(self.rows[np.asarray(ids, np.int64)]) // 4, self.shape.document)

    def _sample(self, row: Mapping[str, str]) -> tuple[dict[str, Tensor], Tensor]:
        document = torch.tensor(self.words.of_document(row["document"], self.shape.document))
        summary = torch.tensor(self.words.of(row["summary"], self.shape.summary))
        return {"input_ids": document, "decoder_input_ids": F.pad(summary[:-1], (1, 0), value=PAD)}, summary


def packages(words: Words, shape: Shape) -> dict[str, Pairs]:
    """Descriptions of Debian's packages, and the line that sums up each."""
    table = Table(DATA, columns=["document", "summary"], lengths="document")
    of_row = np.array([split_of(row["document"]) for row in table.__getitems__(range(len(table)))])
    return {split: Pairs(table, np.flatnonzero(of_row == split), words, shape) for split in ("train", "val", "test")}


def split_of(document: str) -> str:
    """One in twenty is for validation, and one for the test. Documents that begin alike are on the same side."""
    number = hashlib.sha256(document[:40].encode()).digest()[0] % 20
    return {0: "test", 1: "val"}.get(number, "train")


XSUM = "https://huggingface.co/datasets/EdinburghNLP/xsum/resolve/refs%2Fconvert%2Fparquet/default"
XSUM_FILES = {"train": "train", "val": "validation", "test": "test"}
T5_SMALL = "https://huggingface.co/google-t5/t5-small/resolve/main"


def stage_data(stage: Stage) -> None:
    """XSum, 300 MB, and the pretrained t5-small, 240 MB."""
    for split, theirs in XSUM_FILES.items():
        stage.download(f"{XSUM}/{theirs}/0000.parquet", f"xsum/{split}.parquet")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        stage.download(f"{T5_SMALL}/{name}", f"t5-small/{name}")


def xsum(words: Words, shape: Shape) -> dict[str, Pairs]:
    """News articles, and the sentence that introduces each."""
    found = {}
    for split in XSUM_FILES:
        table = Table(staged(f"xsum/{split}.parquet"), columns=["document", "summary"], lengths="document")
        found[split] = Pairs(table, np.arange(len(table)), words, shape)
    return found


def has_xsum() -> bool:
    try:
        return all(staged(f"xsum/{split}.parquet") for split in XSUM_FILES)
    except UserError:
        return False


def rouge(wanted: str, found: str) -> dict[str, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L: F1 of the words, pairs of words and longest common subsequence of two texts."""
    a, b = (re.findall(r"[a-z0-9]+", text.lower()) for text in (wanted, found))
    pairs = [Counter(pairwise(words)) for words in (a, b)]
    return {
        "rouge1": f1((Counter(a) & Counter(b)).total(), len(a), len(b)),
        "rouge2": f1((pairs[0] & pairs[1]).total(), pairs[0].total(), pairs[1].total()),
        "rougeL": f1(common(a, b), len(a), len(b)),
    }


def f1(hits: int, wanted: int, found: int) -> float:
    """The harmonic mean of hits / wanted and hits / found."""
    return 2 * hits / (wanted + found) if hits else 0.0


def common(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest sequence of words that both have in this order, with others in between."""
    best = [0] * (len(b) + 1)
    for word in a:
        diagonal = 0
        for place, other in enumerate(b, 1):
            diagonal, best[place] = best[place], max(best[place], best[place - 1], diagonal + (word == other))
    return best[-1]


def mean_rouge(pairs: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Over (wanted, found)."""
    scores = [rouge(wanted, found) for wanted, found in pairs]
    return {name: sum(score[name] for score in scores) / len(scores) for name in scores[0]}


def lead(document: str, words: int | None = None) -> str:
    """The first sentence of a document, cut to so many words."""
    sentence = re.match(r".+?[.!?](?=\s|$)", document, re.DOTALL)
    return " ".join((sentence[0] if sentence else document).split()[:words])


MOST_COUNTED = 25_000
"""Summaries of the training set that the bars are computed from, evenly spread over it."""


def bars(data: Mapping[str, Pairs]) -> dict[str, float]:
    """What a model must beat: the validation loss of guessing tokens by their frequency; and how long summaries are."""
    train, words, most = data["train"], data["train"].words, data["train"].shape.summary
    rows = np.linspace(0, len(train), min(MOST_COUNTED, len(train)), endpoint=False, dtype=np.int64)
    texts = [row["summary"] for row in train.texts(rows.tolist())]
    counts = np.ones(words.size)
    for text in texts:
        np.add.at(counts, words.of(text, most), 1)
    costs = -np.log(counts / counts.sum())
    tokens = [token for row in data["val"].texts(range(len(data["val"]))) for token in words.of(row["summary"], most)]
    return {"unigram_loss": float(costs[tokens].mean()), "words": sum(len(text.split()) for text in texts) / len(texts)}


def written(writer: T5 | TransformersT5, documents: Sequence[str], batch: int = 32) -> list[str]:
    """Summaries of documents, a batch at a time, those of like length together."""
    words, shape, device = writer.words, writer.shape, next(writer.parameters()).device
    tokens = [torch.tensor(words.of_document(text, shape.document)) for text in documents]
    order = sorted(range(len(tokens)), key=lambda number: len(tokens[number]))
    found = [""] * len(tokens)
    for at in range(0, len(order), batch):
        chosen = order[at : at + batch]
        together = nn.utils.rnn.pad_sequence([tokens[number] for number in chosen], batch_first=True, padding_value=PAD)
        together = together.to(device)
        summaries = writer.write(together, together != PAD, shape.summary)
        for number, summary in zip(chosen, summaries.tolist(), strict=True):
            found[number] = words.text(summary)
    return found


def judged(
    writer: T5 | TransformersT5, data: Mapping[str, Pairs], documents: int = 600, shown: int = 5
) -> dict[str, Any]:
    """Write summaries of test documents, show some, and score them beside what needs no model."""
    test, bar = data["test"], bars(data)
    rows = test.texts(np.linspace(0, len(test), min(documents, len(test)), endpoint=False, dtype=np.int64).tolist())
    summaries = written(writer, [row["document"] for row in rows])
    cut = round(bar["words"])
    leads = {"lead": cut, "lead_uncut": None}
    scores = {"rouge": mean_rouge((row["summary"], text) for row, text in zip(rows, summaries, strict=True))}
    for name, most in leads.items():
        scores[name] = mean_rouge((row["summary"], lead(row["document"], most)) for row in rows)
    print(f"{len(rows)} test documents       ROUGE-1  ROUGE-2  ROUGE-L")
    titles = {"rouge": "the model", "lead": f"first {cut} words", "lead_uncut": "first sentence"}
    for name, score in scores.items():
        print(f"  {titles[name]:20s}" + "".join(f"{value:9.4f}" for value in score.values()))
    print(f"validation loss of guessing by frequency: {bar['unigram_loss']:.4f}")
    for row, text in list(zip(rows, summaries, strict=True))[:shown]:
        print(f"\n  document  {' '.join(row['document'].split())[:200]}")
        print(f"  wanted    {row['summary']}\n  written   {text}")
    return {"documents": len(rows), **scores, **bar}


def summarize(model: nn.Module, text: str) -> str:
    """One sentence for a document.

    text: a file, or the document itself
    """
    try:
        document = Path(text).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{text} cannot be read as text: {error} (--text)") from None
    except (OSError, ValueError):
        document = text
        if len(text.split()) < 2:
            raise UserError(f"{text!r} is no file, nor words; give a document or a file with one (--text)") from None
    assert isinstance(model, T5 | TransformersT5)
    return written(model, [document])[0]


def experiment(
    preset: Literal["tiny", "small", "base", "large"] = "tiny",
    corpus: Literal["auto", "packages", "xsum"] = "auto",
    model: Literal["own", "transformers"] = "own",
    weights: Path | None = None,
    document: int | None = None,
    summary: int | None = None,
    lr: float | None = None,
    dropout: float | None = None,
    pointer: bool | None = None,
) -> Experiment:
    """Documents in one sentence: a transformer of the T5 class.

    preset: size of the model: 1.3, 60, 220 or 740 million parameters
    corpus: descriptions of packages, which are here, or XSum; auto takes XSum where it is staged
    model: the T5 of this file, or that of the library transformers
    weights: folder with config.json, model.safetensors and tokenizer.json to start from; t5-small is one that is staged
    document: most tokens of a document; 64 for tiny, else 512, when absent
    summary: most tokens of a summary; 32 for tiny, else 64, when absent
    lr: highest learning rate; when absent 3e-3 for tiny, and less with the square root of the width
    dropout: share of what is dropped; 0 for tiny, else 0.1, when absent
    pointer: whether tokens can be pointed at in the document; for tiny, when absent
    """
    folder = None if weights is None else found_weights(weights)
    shape = PRESETS[preset] if folder is None else shape_of(folder)
    changes: dict[str, Any] = {"document": document, "summary": summary, "dropout": dropout, "pointer": pointer}
    shape = replace(shape, **{name: value for name, value in changes.items() if value is not None})
    _check(shape, model)
    # T5 was taught with this in front of what is to be summed up.
    words = Words(folder / "tokenizer.json", "summarize: ") if folder else Words(TOKENIZER)
    if words.size > shape.vocabulary:
        raise UserError(f"the tokenizer has {words.size} tokens but the model knows {shape.vocabulary} (--weights)")
    taken = corpus if corpus != "auto" else "xsum" if has_xsum() else "packages"
    data = {"packages": packages, "xsum": xsum}[taken](words, shape)

    def build() -> nn.Module:
        made: T5 | TransformersT5
        if model == "own":
            made = T5(shape)
            if folder is not None:
                load_hf(made, folder)
        else:
            made = TransformersT5(shape, folder)
        made.words = words
        return made

    def after(made: nn.Module, _: Path) -> dict[str, Any]:
        print(f"Summaries of {'XSum' if taken == 'xsum' else 'packages'}.\n")
        assert isinstance(made, T5 | TransformersT5)
        return {"corpus": taken, **judged(made, data)}

    highest = 3e-3 * math.sqrt(PRESETS["tiny"].hidden / shape.hidden) * (1 if folder is None else 0.2)

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        everything = list(parameters)
        matrices = {"params": [p for p in everything if p.ndim >= 2], "weight_decay": 0.01}
        others = {"params": [p for p in everything if p.ndim < 2], "weight_decay": 0.0}
        return torch.optim.AdamW([matrices, others], lr=highest if lr is None else lr, betas=(0.9, 0.98), eps=1e-6)

    return Experiment(
        model=build,
        train=data["train"],
        evals={"val": data["val"], "test": data["test"]},
        loss=token_cross_entropy,
        optimizer=optimizer,
        schedule=Schedule("cosine", warmup=50, final=0.02),
        clip=1.0,
        batch=32,
        epochs=1,
        collate=padded(fill=PAD, mask="attention_mask"),
        shuffle="length",
        tensor_plan=plan(shape) if model == "own" else None,
        after=after,
    )


def _check(shape: Shape, model: str) -> None:
    if not 0 <= shape.dropout < 1:
        raise UserError(f"dropout is {shape.dropout}; it must be at least 0 and below 1 (--dropout)")
    for name, value in (("document", shape.document), ("summary", shape.summary)):
        if value < 2:
            raise UserError(f"{name} is {value}; it must be at least 2 tokens, the last of which is its end (--{name})")
    if shape.pointer and model == "transformers":
        raise UserError("the T5 of transformers has no pointer; leave it away, or take this file's (--model own)")


HF_NAMES = {
    "embed": "shared",
    "head": "lm_head",
    "blocks": "block",
    "bias.table": "block.0.layer.0.SelfAttention.relative_attention_bias",
    "norm": "final_layer_norm",
    "attention_norm": "layer.0.layer_norm",
    "attention": "layer.0.SelfAttention",
    "cross_norm": "layer.1.layer_norm",
    "cross": "layer.1.EncDecAttention",
    "encoder.ffn_norm": "layer.1.layer_norm",
    "encoder.ffn": "layer.1.DenseReluDense",
    "decoder.ffn_norm": "layer.2.layer_norm",
    "decoder.ffn": "layer.2.DenseReluDense",
    "down": "wo",
}
"""What parts of a parameter's name are called by Hugging Face; the order of numbers in the weights is the same."""


def hf_name(name: str, gated: bool) -> str:
    """The name of a parameter as Hugging Face has it."""
    stack, *parts = name.replace("bias.table", "bias_table").split(".")
    up = {"gate": "wi_0", "up": "wi_1"} if gated else {"up": "wi"}
    names = {**HF_NAMES, **up, "bias_table": HF_NAMES["bias.table"]}
    found = [names.get(f"{stack}.{part}", names.get(part, part)) for part in parts]
    return ".".join([HF_NAMES.get(stack, stack), *found])


def hf_parameters(t5: T5) -> dict[str, nn.Parameter]:
    """The parameters under Hugging Face's names; a tied head is not among them, nor a pointer."""
    gated = t5.shape.gated
    return {
        hf_name(name, gated): parameter for name, parameter in t5.named_parameters() if not name.startswith("pointer.")
    }


HF_FIELDS = {
    "vocab_size": "vocabulary",
    "d_model": "hidden",
    "num_layers": "layers",
    "num_decoder_layers": "decoder_layers",
    "num_heads": "heads",
    "d_kv": "head_size",
    "d_ff": "ffn",
    "relative_attention_num_buckets": "buckets",
    "relative_attention_max_distance": "furthest",
    "dropout_rate": "dropout",
    "layer_norm_epsilon": "eps",
    "tie_word_embeddings": "tied",
}
"""Fields of a config.json that say the same as ours."""


def hf_config(shape: Shape) -> dict[str, Any]:
    """The shape as a config.json says it."""
    return {
        "model_type": "t5",
        **{theirs: getattr(shape, ours) for theirs, ours in HF_FIELDS.items()},
        "feed_forward_proj": "gated-gelu" if shape.gated else "relu",
        "pad_token_id": PAD,
        "eos_token_id": END,
        "decoder_start_token_id": PAD,
    }


def found_weights(path: Path) -> Path:
    """A folder with weights; a name that is none may be that of a staged one."""
    folder = path
    if not path.is_dir():
        try:
            folder = staged(str(path / "model.safetensors")).parent
        except UserError as error:
            raise UserError(f"there is no folder {path} here, and {error} (--weights)") from None
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (folder / name).is_file():
            raise UserError(
                f"{folder} has no {name}; weights are a folder with config.json, model.safetensors and tokenizer.json, "
                f"since no pickles are read (--weights)"
            )
    return folder


def shape_of(folder: Path) -> Shape:
    """The shape that a folder's config.json says."""
    config = folder / "config.json"
    defaults = hf_config(replace(PRESETS["small"], tied=True))
    try:
        theirs = json.loads(config.read_bytes())
        if theirs["model_type"] != "t5":
            raise UserError(f"{config} is of a model of type {theirs['model_type']!r}; it must be t5 (--weights)")
        theirs = {**defaults, "num_decoder_layers": theirs["num_layers"], **theirs}
        kind = theirs["feed_forward_proj"]
        if kind not in ("relu", "gated-gelu"):
            raise UserError(f"feed_forward_proj is {kind!r} in {config}; it must be relu or gated-gelu (--weights)")
        shape = {ours: type(defaults[field])(theirs[field]) for field, ours in HF_FIELDS.items()}
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise UserError(f"{config} is not the config.json of a T5: {error!r:.200} (--weights)") from None
    return Shape(**shape, gated=kind == "gated-gelu")


_BESIDE = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
"""What files hold beside the parameters: other names of the embedding, and a bias that no version has ever used."""


def load_hf(t5: T5, folder: Path) -> None:
    """Read weights in Hugging Face's names, which must be those of this very model; if not, nothing is read."""
    parameters, path = hf_parameters(t5), folder / "model.safetensors"
    beside = {*_BESIDE, _UNUSED, *(["lm_head.weight"] if t5.shape.tied else [])}
    try:
        file = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read weights from {path}: {error} (--weights)") from None
    with file:
        names = set(file.keys()) - beside
        if missing := parameters.keys() - names:
            raise UserError(f"the weights in {path} lack {_some(missing)}, which this model has (--weights)")
        if extra := names - parameters.keys():
            raise UserError(f"the weights in {path} have {_some(extra)}, which this model has not (--weights)")
        for name, parameter in parameters.items():
            found = file.get_slice(name).get_shape()
            if found != list(parameter.shape):
                raise UserError(
                    f"{name} in {path} has the shape {found} but its config.json says {list(parameter.shape)}; "
                    f"give files that belong together (--weights)"
                )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(file.get_tensor(name))


def _some(names: Iterable[str]) -> str:
    """The first of them, and how many more there are."""
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first
