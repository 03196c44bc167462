"""A language model of the Llama class on two centuries of speeches.

    meshrun run llama                                  # a million parameters, this process
    meshrun run llama --procs 2                        # two local processes, the same losses
    meshrun run llama --preset 150m --precision bf16   # bigger, on GPUs
    meshrun run llama --preset 8b --weights Meta-Llama-3-8B --text mine.tokens
    meshrun use runs/llama-1 generate --prompt "My fellow citizens"

The text is the 233 speeches on the State of the Union from 1790 to 2021, which come with the package as tokens of a
byte-pair encoding of 2,048; the last twelve are for validation. Presets with a larger vocabulary train on the same
tokens, whose numbers are below it, and leave the rest unused: enough to see how fast a shape is and what it needs.
`meshrun stage llama` fetches more text, and `meshrun convert-data` makes tokens of any.

The file has four parts: the model, which is torch and nothing else; the experiment; how it speaks; weights to and from
Hugging Face.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from meshrun import Experiment, Schedule, Stage, TokenFile, UserError, perplexity, staged, token_cross_entropy

DATA = Path(__file__).parent / "data" / "speeches.tokens"
VALIDATION_WINDOWS = 64
"""So many windows of what is not trained on are evaluated, which takes seconds on a CPU."""
WIKIPEDIA = (
    "https://huggingface.co/datasets/wikimedia/wikipedia/resolve/cf26be8eef6bc935da5d2281be5aad4813e49e90/"
    "20231101.simple/train-00000-of-00001.parquet"
)
WIKIPEDIA_SHA256 = "31bded16768a47c286becd292079122f5d7d4397a17b87d4250a00ccd581e6f0"


@dataclass(frozen=True)
class Shape:
    """The numbers that make a model."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    """Heads of keys and values, each shared by heads / kv_heads heads of queries."""
    ffn: int
    context: int
    """Tokens of a training sample; the weights do not depend on it."""
    theta: float = 10_000.0
    """Base of the rotary embedding's wavelengths."""
    tied: bool = False
    """Whether the head uses the embedding's weights."""
    dropout: float = 0.0
    eps: float = 1e-5

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


PRESETS = {
    "tiny": Shape(2048, 96, layers=8, heads=8, kv_heads=4, ffn=192, context=128, dropout=0.1),
    "20m": Shape(2048, 384, layers=12, heads=8, kv_heads=4, ffn=1024, context=256),
    "150m": Shape(32_000, 768, layers=16, heads=12, kv_heads=4, ffn=2048, context=1024),
    "1b": Shape(32_000, 2048, layers=16, heads=32, kv_heads=8, ffn=8192, context=2048, theta=5e5),
    "8b": Shape(128_256, 4096, layers=32, heads=32, kv_heads=8, ffn=14_336, context=8192, theta=5e5),
    "70b": Shape(128_256, 8192, layers=80, heads=64, kv_heads=8, ffn=28_672, context=8192, theta=5e5),
}

REHEARSAL = {"preset": "tiny", "context": 32, "weights": None}
"""Options of a model that `meshrun rehearse` trains in no time, with heads and layers for most layouts."""

PLAN = {
    # Every rank holds a part of the vocabulary's rows; their sum is handed out along the sequence.
    "embed": "embedding_scatter",
    # Works on this rank's part of the sequence; its weights are the same on all ranks.
    "blocks.*.attention_norm": "sequence",
    # The parts of the sequence are gathered before it, so that it sees the whole.
    "blocks.*.attention": "gather",
    # Outputs are split over ranks: each has some of the heads.
    "blocks.*.attention.wq": "colwise",
    "blocks.*.attention.wk": "colwise",
    "blocks.*.attention.wv": "colwise",
    # Inputs are split over ranks; the sum of what they give is handed out along the sequence.
    "blocks.*.attention.wo": "rowwise_scatter",
    "blocks.*.attention_dropout": "sequence",
    "blocks.*.ffn_norm": "sequence",
    "blocks.*.ffn": "gather",
    "blocks.*.ffn.gate": "colwise",
    "blocks.*.ffn.up": "colwise",
    "blocks.*.ffn.down": "rowwise_scatter",
    "blocks.*.ffn_dropout": "sequence",
    "norm": "sequence",
    # The sequence is gathered before it, and its outputs stay split over the vocabulary, for the loss.
    "head": "head",
}
"""How the model is split over tensor-parallel ranks, by the names of its modules."""


def segments(net: Any) -> Sequence[nn.Module]:
    """The model as modules applied in order, each to what the one before it gave."""
    return [net.embed, *net.blocks, net.norm, net.head]


class Embedding(nn.Embedding):
    """Vectors of length about 1, or as small as other matrices where the head shares them.

    Much shorter ones would now and then be cancelled by what the first block adds: a norm divides by what is left.
    """

    def __init__(self, entries: int, size: int, shared: bool) -> None:
        self.std = 0.02 if shared else size**-0.5  # before the constructor, which already draws
        super().__init__(entries, size)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Linear(nn.Linear):
    """A matrix, without bias, drawn from a normal distribution."""

    def __init__(self, inputs: int, outputs: int, std: float = 0.02) -> None:
        self.std = std  # before the constructor, which already draws
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Llama(nn.Module):
    """Tokens (N, T) to logits (N, T, vocabulary).

    `positions` (T) says where in the sequence the tokens stand; 0 to T - 1 when absent. `documents` (N, T) numbers the
    documents of a sequence: each is read as if it stood alone. `past` holds what each block keeps of the tokens before
    these, an empty list at first; the rest is then read one token at a time, as `generate` does.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.text: TokenFile | None = None
        """What it is trained on; its tokenizer is what `generate` speaks with."""
        self.embed = Embedding(shape.vocabulary, shape.hidden, shape.tied)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.head = Linear(shape.hidden, shape.vocabulary)
        if shape.tied:
            self.head.weight = self.embed.weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        past: Sequence[list[Tensor]] | None = None,
    ) -> Tensor:
        mask = None
        if documents is not None:
            if positions is not None:
                raise UserError(
                    "documents are kept apart by a mask (--separate), but a rank of cp sees a part of a sequence only; "
                    "leave --separate away, or use a layout without cp (--layout)"
                )
            positions, mask = apart(documents)
        # Once for all blocks: a compiler would compute sines anew wherever a block uses them.
        places = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        turns = rotary(places, self.shape.head_size, self.shape.theta)
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x, turns, mask, None if past is None else past[number])
        return self.head(self.norm(x))


def apart(documents: Tensor) -> tuple[Tensor, Tensor]:
    """Positions (N, T) that begin anew in each document, and a mask (N, 1, T, T) of the tokens that each one sees."""
    places = torch.arange(documents.shape[1], device=documents.device)
    begins = documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0
    positions = places - torch.where(begins, places, 0).cummax(dim=1).values
    return positions, (documents[:, None, :, None] == documents[:, None, None, :]).tril()


class Block(nn.Module):
    """Attention, then a feed-forward network, each on normed inputs and added to what came in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.attention = Attention(shape)
        self.attention_dropout = nn.Dropout(shape.dropout)
        self.ffn_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.ffn = FeedForward(shape)
        self.ffn_dropout = nn.Dropout(shape.dropout)

    def forward(
        self,
        x: Tensor,
        turns: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        past: list[Tensor] | None = None,
    ) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), turns, mask, past))
        return x + self.ffn_dropout(self.ffn(self.ffn_norm(x)))


class Attention(nn.Module):
    """Causal attention, or that of a mask, in which several heads of queries share one of keys and values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size, self.theta = shape.head_size, shape.theta
        self.wq = Linear(shape.hidden, shape.heads * shape.head_size)
        self.wk = Linear(shape.hidden, shape.kv_heads * shape.head_size)
        self.wv = Linear(shape.hidden, shape.kv_heads * shape.head_size)
        self.wo = Linear(shape.heads * shape.head_size, shape.hidden, _std_into_residual(shape))

    def forward(
        self,
        x: Tensor,
        turns: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        past: list[Tensor] | None = None,
    ) -> Tensor:
        n, t, _ = x.shape
        cos, sin = turns or rotary(torch.arange(t, device=x.device), self.head_size, self.theta)
        # The number of heads is what the matrices give: a model may hold only some of them.
        q = rotate(self.wq(x).view(n, t, -1, self.head_size), cos, sin).transpose(1, 2)
        k = rotate(self.wk(x).view(n, t, -1, self.head_size), cos, sin).transpose(1, 2)
        v = self.wv(x).view(n, t, -1, self.head_size).transpose(1, 2)
        if past is not None:
            k, v = past[:] = [torch.cat(both, dim=2) for both in zip(past, (k, v), strict=True)] if past else [k, v]
        if q.is_cuda and (q.dtype == torch.float32 or mask is not None):
            # No kernel of a GPU shares heads in fp32 or under a mask, and without one torch keeps all T x T scores.
            k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
        # A single token after those that are kept sees all of them.
        causal = mask is None and t == k.shape[2]
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
        return self.wo(out.transpose(1, 2).reshape(n, t, -1))


class FeedForward(nn.Module):
    """SwiGLU: one matrix says how much of the other's outputs passes."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = Linear(shape.hidden, shape.ffn)
        self.up = Linear(shape.hidden, shape.ffn)
        self.down = Linear(shape.ffn, shape.hidden, _std_into_residual(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def _std_into_residual(shape: Shape) -> float:
    """Two outputs a layer add up in the residual stream: smaller ones keep its size independent of the depth."""
    return 0.02 / math.sqrt(2 * shape.layers)


def rotary(positions: Tensor, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines (…, T, 1, head_size / 2), in fp32: positions of thousands do not fit less."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=positions.device) / head_size
    angles = positions.float()[..., None, None] * theta**-exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_size / 2) of (N, T, heads, head_size), the pairs that Hugging Face's weights have."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def experiment(
    preset: Literal["tiny", "20m", "150m", "1b", "8b", "70b"] = "tiny",
    lr: float | None = None,
    context: int | None = None,
    dropout: float | None = None,
    weights: Path | None = None,
    text: Path | None = None,
    validation: float = 0.05,
    separate: bool = False,
) -> Experiment:
    """A language model of the Llama class.

    preset: size of the model: 1 million parameters to 70 billion
    lr: highest learning rate; when absent 3e-3 for tiny, and less with the square root of the width
    context: tokens of a sample; 128 for tiny, up to 8192 for 8b and 70b, when absent
    dropout: share of each layer's outputs that are dropped; 0.1 for tiny, else 0, when absent
    weights: safetensors file, or folder, with weights of Hugging Face's names to start from
    text: token file to train on, made by meshrun convert-data; the speeches when absent
    validation: share of the text's documents, the last ones, that are not trained on
    separate: attention and targets do not cross from one document to the next
    """
    shape = PRESETS[preset]
    shape = replace(
        shape,
        context=shape.context if context is None else context,
        dropout=shape.dropout if dropout is None else dropout,
    )
    if not 0 <= shape.dropout < 1:
        raise UserError(f"dropout is {shape.dropout}; it must be at least 0 and below 1 (--dropout)")
    highest = 3e-3 * math.sqrt(PRESETS["tiny"].hidden / shape.hidden) if lr is None else lr
    path = DATA if text is None else text
    if path.parent == Path() and not path.exists():
        path = _staged(path)
    last = _last_documents(path, validation)

    def windows(documents: slice, most: int | None = None) -> TokenFile:
        return TokenFile(
            path, shape.context, documents=documents, cross=not separate, vocabulary=shape.vocabulary, most=most
        )

    train, val = windows(slice(None, -last)), windows(slice(-last, None), VALIDATION_WINDOWS)

    def model() -> Llama:
        made = Llama(shape)
        made.text = train
        if weights is not None:
            load_hf(made, weights)
        return made

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        everything = list(parameters)
        matrices = {"params": [p for p in everything if p.ndim >= 2], "weight_decay": 0.1}
        scales = {"params": [p for p in everything if p.ndim < 2], "weight_decay": 0.0}
        # A large eps, as Llama 2 was trained with: where a gradient is next to nothing, so is the update.
        return torch.optim.AdamW([matrices, scales], lr=highest, betas=(0.9, 0.95), eps=1e-5)

    return Experiment(
        model=model,
        train=train,
        evals={"val": val},
        loss=token_cross_entropy,
        metrics={"perplexity": perplexity},
        optimizer=optimizer,
        schedule=Schedule("cosine", warmup=100, final=0.1),
        clip=1.0,
        batch=min(16, len(train)),
        steps=600,
        # Of a model that takes many devices no single one is asked to speak.
        after=(lambda model, _: _speak(model, val)) if shape.hidden <= PRESETS["1b"].hidden else None,
        segments=segments,
        tensor_plan=PLAN,
    )


def _last_documents(path: Path, share: float) -> int:
    """How many documents at the end of a token file are for validation."""
    documents = TokenFile(path, 1).layout.documents
    last = max(1, round(share * documents))
    if not 0 < share < 1 or last >= documents:
        raise UserError(
            f"validation is {share} of {documents:,} documents in {path}; it must be above 0 and below 1, and leave at "
            f"least one document for each of training and validation (--validation, --text)"
        )
    return last


def _staged(path: Path) -> Path:
    """A file that is not in the working directory, where `meshrun stage` puts them."""
    try:
        return staged(path.name)
    except UserError as error:
        place, missing, _ = str(error).partition(" is not here; ")
        if not missing:
            raise
        raise UserError(
            f"neither {path} nor {place} is there; meshrun convert-data makes one of your own texts (--text)"
        ) from None


def stage_data(stage: Stage) -> None:
    """More text than comes with the package: 241,787 articles, 157 MB, CC BY-SA 3.0."""
    articles = stage.download(WIKIPEDIA, "wikipedia.parquet", sha256=WIKIPEDIA_SHA256)
    stage.note(
        f"{articles} is text; to train on it: meshrun convert-data {articles} {articles.with_suffix('.tokens')} "
        f"--vocabulary 32000, then meshrun run llama --preset 150m --text wikipedia.tokens"
    )


def _speak(model: Any, val: TokenFile) -> dict[str, Any]:
    """What the best weights reach, and how they sound."""
    reached = _perplexity_on(model, val)
    print(f"perplexity {reached:,.1f} on {len(val):,} windows of text that it has not seen")
    try:
        text = generate(model, tokens=60)
    except UserError as missing:
        print(missing)
        return {"perplexity": reached}
    print(text)
    return {"perplexity": reached, "text": text}


@torch.no_grad()
def _perplexity_on(model: Llama, data: TokenFile) -> float:
    """The number of tokens among which the model is as unsure as if it had to guess."""
    device, total, count = model.embed.weight.device, 0.0, 0
    for first in range(0, len(data), 8):
        inputs, targets = data.batch_of(range(first, min(first + 8, len(data))))
        named = inputs if isinstance(inputs, dict) else {"tokens": inputs}
        outputs = model(**{name: each.to(device) for name, each in named.items()})
        loss = token_cross_entropy(outputs, targets.to(device))
        total, count = total + float(loss.total), count + int(loss.count)
    return math.exp(total / count)


def generate(
    model: Llama,
    prompt: str = "My fellow citizens",
    tokens: int = 100,
    temperature: float = 0.8,
    top: int = 40,
    seed: int = 0,
) -> str:
    """Let the model go on with a text.

    prompt: what the text begins with
    tokens: how many follow
    temperature: 0 takes the likeliest token each time, 1 draws with the model's own odds
    top: only so many of the likeliest tokens are drawn from
    seed: of the draws
    """
    for name, value, least in (("tokens", tokens, 1), ("temperature", temperature, 0), ("top", top, 1)):
        if value < least:
            raise UserError(f"{name} is {value}; it must be at least {least} (--{name})")
    tokenizer = _tokenizer_of(model)
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor) -> int:
        # A model may have room for more tokens than its text uses.
        likeliest = (
            logits[: tokenizer.get_vocab_size()]
            .float()
            .cpu()
            .topk(1 if temperature == 0 else min(top, tokenizer.get_vocab_size()))
        )
        odds = (likeliest.values / (temperature or 1)).softmax(0)
        return int(likeliest.indices[torch.multinomial(odds, 1, generator=generator)])

    ids = [_start(model), *tokenizer.encode(prompt, add_special_tokens=False).ids]
    return tokenizer.decode(_continued(model, ids, tokens, choose))


def _tokenizer_of(model: Llama) -> Any:
    """The tokenizer of the text that a model is trained on."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError("to speak, the model needs the library tokenizers: pip install 'meshrun[text]'") from None
    assert model.text is not None
    return Tokenizer.from_file(str(model.text.tokenizer))


def _start(model: Llama) -> int:
    """The token that every document begins with, such as the first one."""
    assert model.text is not None
    inputs, _ = model.text[0]
    return int((inputs["tokens"] if isinstance(inputs, dict) else inputs)[0])


@torch.no_grad()
def _continued(model: Llama, ids: list[int], tokens: int, choose: Callable[[Tensor], int]) -> list[int]:
    """The tokens, and as many after them, each chosen from the logits.

    What the blocks keep of earlier tokens is used until a context is full; its second half begins the next one.
    """
    device, context = model.embed.weight.device, model.shape.context
    begin = max(0, len(ids) - context)
    past: list[list[Tensor]] = [[] for _ in model.blocks]
    for _ in range(tokens):
        if len(ids) - begin > context:
            begin, past = len(ids) - max(1, context // 2), [[] for _ in model.blocks]
        new = ids[-1:] if past[0] else ids[begin:]
        places = torch.arange(len(ids) - begin - len(new), len(ids) - begin, device=device)
        logits = model(torch.tensor([new], device=device), places, past=past)
        ids = [*ids, choose(logits[0, -1])]
    return ids


HF_NAMES = {
    "embed": "model.embed_tokens",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn": "mlp",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
"""Each part of a parameter's name as Hugging Face calls it; the order of numbers in the weights is the same."""


def hf_parameters(net: Llama) -> dict[str, nn.Parameter]:
    """The parameters under Hugging Face's names; a tied head is not among them."""
    return {
        ".".join(HF_NAMES.get(part, part) for part in name.split(".")): parameter
        for name, parameter in net.named_parameters()
    }


def save_hf(model: Llama, folder: Path) -> None:
    """Write a folder that `transformers.AutoModelForCausalLM.from_pretrained` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in hf_parameters(model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    dtype = str(model.embed.weight.dtype).removeprefix("torch.")
    config = {**hf_config(model.shape), "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # which safetensors makes for its owner alone


def hf_config(shape: Shape) -> dict[str, Any]:
    """The shape as a config.json says it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.ffn,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def load_hf(net: Llama, path: Path) -> None:
    """Read weights in Hugging Face's names: a safetensors file, or a folder with one, or with several and their index.

    They must be those of this very model: no tensor more, none less, each of its shape. If not, nothing is read.
    """
    parameters = hf_parameters(net)
    with ExitStack() as stack:
        try:
            opened = [stack.enter_context(safe_open(file, framework="pt")) for file in _safetensors(path)]
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot read weights from {path}: {error} (--weights)") from None
        # Files of older versions hold the rotary embedding's frequencies too, which are computed here.
        files = {name: file for file in opened for name in file.keys() if not name.endswith("rotary_emb.inv_freq")}  # noqa: SIM118
        if missing := parameters.keys() - files.keys():
            raise UserError(f"the weights in {path} lack {_some(missing)}, which this model has (--weights)")
        if extra := files.keys() - parameters.keys():
            raise UserError(f"the weights in {path} have {_some(extra)}, which this model has not (--weights)")
        for name, parameter in parameters.items():
            found = files[name].get_slice(name).get_shape()
            if found != list(parameter.shape):
                raise UserError(
                    f"{name} in {path} has the shape {found} but this model needs {list(parameter.shape)}; "
                    f"give weights of the same preset (--weights, --preset)"
                )
        _check_config((path if path.is_dir() else path.parent) / "config.json", net.shape)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(files[name].get_tensor(name))


def _safetensors(path: Path) -> list[Path]:
    """The files that hold the weights: no pickles, which could run code."""
    if path.is_file():
        return [path]
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            files = [path / name for name in names]
        except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
            raise UserError(f"{index} is not an index of safetensors files (--weights)") from None
        for name, file in zip(names, files, strict=True):
            try:
                there = file.is_file()
            except OSError:  # a name that no file can have
                there = False
            if not there:
                raise UserError(f"{index} names {name!r:.200}, which is no file in {path}; copy it there (--weights)")
        return files
    if single.is_file():
        return [single]
    raise UserError(
        f"there are no weights at {path}; it must be a safetensors file, or a folder with {single.name} "
        f"or {index.name} (--weights)"
    )


def _check_config(config: Path, shape: Shape) -> None:
    """Refuse weights that fit but mean something else: no tensor's shape tells of these numbers."""
    if not config.is_file():
        return
    try:
        theirs = json.loads(config.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{config} is not valid JSON: {error} (--weights)") from None
    if not isinstance(theirs, dict):
        raise UserError(f"{config} is no table of what the model is (--weights)")
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"the rope parameters in {config} are {rope!r:.80} and no table (--weights)")
    theirs = {"rope_theta": 10_000.0, "rope_type": rope.get("type", "default"), **theirs, **rope}
    ours = {**hf_config(shape), "rope_type": "default"}
    for name in ("num_attention_heads", "rms_norm_eps", "rope_theta", "rope_type", "hidden_act"):
        if theirs.get(name, ours[name]) != ours[name]:
            raise UserError(
                f"{name} is {theirs[name]!r} in {config} but {ours[name]!r} in this model, "
                f"for which these weights mean nothing; give weights made for it (--weights)"
            )


def _some(names: Iterable[str]) -> str:
    """The first of them, and how many more there are."""
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first
