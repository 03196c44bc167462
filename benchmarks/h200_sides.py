"""The sides that h200.py compares: each is a function that the side's own process calls.

    SIDES["llama"]["fabric"](tiny=False)        # one update each time it is asked

Peers train the models that their documentation trains (transformers' Llama and T5, torchvision's ResNet), with the
loop that it shows (`meshrun.check.bench_peers`); bare torch trains this package's plain modules, as a user would. All
have the same batches, optimizer, schedule and clipping. Weights are drawn where it is quickest, so first losses are
alike and not the same.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshrun import Experiment, cross_entropy
from meshrun.check import bench_peers as peers
from meshrun.check.bench_rank import tokens_of
from meshrun.check.bench_roofline import product_size
from meshrun.check.bench_task import Side, Task
from meshrun.parallel.how import How
from meshrun.parallel.placed import call
from meshrun.recipes import images, llama, summarize

CLASSES = 1000
FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Who computes attention, on GPUs from Hopper on."""
STEPS = 10_000
"""Of the training that a side is asked for: in that of the Llama of a billion, an hour."""
DEFAULTS = How(recompute="auto", compile=None, graphs=None)
"""What `meshrun run` does when nothing is asked for."""


def device_of(tiny: bool) -> torch.device:
    return torch.device("cpu") if tiny else torch.device("cuda", 0)


def task_of(kind: type[Task], experiment: Experiment, tiny: bool) -> Task:
    # Real compiling takes minutes on a CPU: tiny runs only go through the motions.
    backend = "eager" if tiny else "inductor"
    how = replace(DEFAULTS, compile=False) if tiny else DEFAULTS
    return kind(experiment, how, device_of(tiny), workers=0, backend=backend).lasting(STEPS)


class Plain(Task):
    """This package's module as a user of bare torch would train it: compiled, and no kernel of meshrun's in it."""

    @cached_property
    def entropy(self) -> Callable[..., Tensor]:
        return torch.compile(F.cross_entropy, backend=self.backend)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        with torch.device(self.device):
            return self.experiment.model()

    def loss(self, model: Callable[..., Any], step: int, inputs: Any, targets: Any) -> Tensor:
        del step
        outputs = call(model, inputs)  # type: ignore[arg-type]
        return self.entropy(outputs.flatten(0, -2), targets.flatten())


class InBf16(Plain):
    """All of it in bfloat16, weights and moments too; attention by cuDNN where it can."""

    def model(self) -> nn.Module:
        return super().model().to(torch.bfloat16)

    def autocast(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def loss(self, model: Callable[..., Any], step: int, inputs: Any, targets: Any) -> Tensor:
        with sdpa_kernel(FASTEST_FIRST, set_priority=True):
            return super().loss(model, step, inputs, targets)


# Llama, a billion parameters


def llama_experiment(tiny: bool, precision: str = "bf16") -> Experiment:
    made = llama.experiment(preset="tiny", context=32, dropout=0.0) if tiny else llama.experiment(preset="1b")
    return replace(made, batch=4 if tiny else 16, precision=precision, evals={}, after=None)


class Tabled(llama.Llama):
    """The same with cosines and sines in a table, as most write it.

    Compiled whole, the recipe's model computes them in every kernel that turns queries or keys: a tenth of the step.
    """

    def __init__(self, shape: llama.Shape) -> None:
        super().__init__(shape)
        self.turns = llama.rotary(torch.arange(shape.context), shape.head_size, shape.theta)

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.turns)
        outputs: Tensor = self.head(self.norm(x))
        return outputs


def bare_llama_experiment(tiny: bool) -> Experiment:
    made = llama_experiment(tiny)
    shape = shape_of(made)
    return replace(made, model=lambda: Tabled(shape))


def shape_of(experiment: Experiment) -> Any:
    """The numbers that the model of a recipe is made from."""
    with torch.device("meta"):
        return experiment.model().shape


LARGEST = llama.Shape(32_000, 6144, layers=40, heads=48, kv_heads=8, ffn=16_384, context=2048, theta=5e5)
"""About what one card of 139 GiB can train: 8 bytes a parameter, and little beside them."""


def largest_experiment(tiny: bool) -> Experiment:
    made = llama.experiment(preset="tiny", context=32) if tiny else llama.experiment(preset="1b")
    shape = llama.PRESETS["tiny"] if tiny else LARGEST
    changes: dict[str, Any] = {"model": lambda: llama.Llama(shape), "clip": None, "evals": {}, "after": None}
    return replace(made, **changes, batch=4 if tiny else 1, precision="bf16")


SPARING = replace(DEFAULTS, states="8bit", update_in_backward=True)
"""What takes least memory: moments in 8 bits, and no gradient longer than it is needed."""


def largest(tiny: bool, steps: int) -> dict[str, Any]:
    """What a step of the largest model takes; called in a process of its own."""
    experiment, device = largest_experiment(tiny), device_of(tiny)
    how = replace(SPARING, compile=False, states="fp32") if tiny else SPARING
    side = peers.Told(Task(experiment, how, device, workers=0).lasting(STEPS))
    losses = [float(next(side).loss) for _ in range(3)]
    began = time.perf_counter()
    losses += [float(each.loss) for each in itertools.islice(side, steps)]
    seconds = (time.perf_counter() - began) / steps
    return {
        "parameters": side.parameters,
        "batch": experiment.batch,
        "tokens_per_s": experiment.batch * tokens_of(experiment.train[0][0]) / seconds,
        "step_s": seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / (1 << 30) if device.type == "cuda" else None,
        "losses": losses,
        "chosen": side.chosen,
    }


class TransformersLlama(Task):
    """https://huggingface.co/docs/transformers/tasks/language_modeling"""

    def model(self) -> nn.Module:
        from transformers import AutoModelForCausalLM, LlamaConfig

        theirs = llama.hf_config(shape_of(self.experiment))
        named = {name: value for name, value in theirs.items() if name != "architectures"}
        config = LlamaConfig(**{**named, "use_cache": False})
        torch.manual_seed(0)
        with torch.device(self.device):
            made: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        return made

    def loss(self, model: Callable[..., Any], step: int, inputs: Any, targets: Any) -> Tensor:
        del step, targets
        loss: Tensor = model(input_ids=inputs, labels=inputs).loss
        return loss


# T5, of documents of 512 tokens summaries of 150


@dataclass(frozen=True)
class Documents:
    """Random pairs, all of the same length."""

    vocabulary: int
    document: int
    summary: int
    light, draws = True, False

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        drawn = torch.randint(2, self.vocabulary, (self.document + self.summary,), generator=_drawing(index))
        document, summary = drawn.split((self.document, self.summary))
        read = {"input_ids": document, "attention_mask": torch.ones_like(document, dtype=torch.bool)}
        return {**read, "decoder_input_ids": torch.cat([summary.new_zeros(1), summary[:-1]])}, summary


def _drawing(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def t5_experiment(tiny: bool) -> Experiment:
    document, summary = (24, 10) if tiny else (512, 150)
    preset = "tiny" if tiny else "base"
    made = summarize.experiment(preset=preset, corpus="packages", document=document, summary=summary, pointer=False)
    data = Documents(summarize.PRESETS[preset].vocabulary, document, summary)
    changes: dict[str, Any] = {"train": data, "collate": None, "shuffle": "full", "evals": {}, "after": None}
    return replace(made, **changes, batch=4 if tiny else 32, precision="bf16")


class TransformersT5(Task):
    """https://huggingface.co/docs/transformers/tasks/summarization"""

    def model(self) -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        named = summarize.hf_config(shape_of(self.experiment))
        config = T5Config(**{key: named[key] for key in named if key not in ("architectures", "model_type")})
        torch.manual_seed(0)
        with torch.device(self.device):
            return T5ForConditionalGeneration(config)

    def loss(self, model: Callable[..., Any], step: int, inputs: Any, targets: Any) -> Tensor:
        del step
        mask = inputs["attention_mask"].long()
        loss: Tensor = model(input_ids=inputs["input_ids"], attention_mask=mask, labels=targets).loss
        return loss


# ResNet-50 at 224 pixels


class Pixels:
    """Random images, all in memory, in batches that are put together already: no side spends time on reading."""

    light, draws = True, False

    def __init__(self, length: int, size: int) -> None:
        generator = _drawing(0)
        self.images = torch.randint(0, 256, (length, 3, size, size), dtype=torch.uint8, generator=generator)
        self.labels = torch.randint(CLASSES, (length,), generator=generator)
        if torch.cuda.is_available():
            self.images, self.labels = self.images.pin_memory(), self.labels.pin_memory()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def batch_of(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        first, count = ids[0], len(ids)
        assert ids == list(range(first, first + count))
        return self.images[first : first + count], self.labels[first : first + count]


def resnet_experiment(tiny: bool) -> Experiment:
    shape = replace(images.PRESETS["tiny" if tiny else "resnet50"], norm="batch", size=32 if tiny else 224)
    batch = 8 if tiny else 256
    return Experiment(
        model=lambda: images.ResNet(shape, [str(number) for number in range(CLASSES)]),
        train=Pixels(4 * batch, shape.size),
        loss=cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch=batch,
        steps=1000,
        shuffle="none",
        precision="bf16",
        segments=images.segments,
    )


class ReadyImages(Task):
    """torchvision's network, on batches that are put together already: https://docs.pytorch.org/vision/stable/models"""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        with torch.device(self.device):
            try:
                from torchvision.models import resnet50
            except (ImportError, RuntimeError):  # the wheels do not fit every torch
                return self.experiment.model()
            return nn.Sequential(Scaled(), resnet50(num_classes=CLASSES))

    def loader(self) -> Iterable[Any]:
        data, batch = self.experiment.train, self.experiment.batch
        assert isinstance(data, Pixels)
        ready = list(zip(data.images.split(batch), data.labels.split(batch), strict=True))
        return Again(ready, self.total_steps)

    def loss(self, model: Callable[..., Any], step: int, inputs: Any, targets: Any) -> Tensor:
        del step
        return F.cross_entropy(model(inputs), targets)


class Scaled(nn.Module):
    """Bytes to what the network expects."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))
        self.register_buffer("deviation", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        return (pixels.float() / 255 - self.mean) / self.deviation


@dataclass(frozen=True)
class Again:
    """Some batches, again and again."""

    ready: list[Any]
    steps: int

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(itertools.cycle(self.ready), self.steps)


def products(tiny: bool) -> Side:
    """Large matrix products in bf16, one each time it is asked: what the device can do at most."""
    device = device_of(tiny)
    size = product_size(device)
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    while True:
        torch.mm(one, other)
        yield 0.0


def _side(make: Callable[[Task], Side], kind: type[Task], experiment: Callable[[bool], Experiment], tiny: bool) -> Side:
    return iter(make(task_of(kind, experiment(tiny), tiny)))


EXPERIMENTS: dict[str, Callable[[bool], Experiment]] = {
    "llama": llama_experiment,
    "t5": t5_experiment,
    "resnet": resnet_experiment,
}
float8 = partial(llama_experiment, precision="float8")
SIDES: dict[str, dict[str, Callable[[bool], Side]]] = {
    "llama": {
        "meshrun": partial(_side, peers.meshrun, Task, llama_experiment),
        "meshrun float8": partial(_side, peers.meshrun, Task, float8),
        "bare bf16 compiled": partial(_side, peers.bare_compiled, InBf16, bare_llama_experiment),
        "bare autocast compiled": partial(_side, peers.bare_compiled, Plain, bare_llama_experiment),
        "fabric": partial(_side, peers.fabric, TransformersLlama, llama_experiment),
        "fabric compile": partial(_side, peers.fabric_compile, TransformersLlama, llama_experiment),
        "accelerate": partial(_side, peers.accelerate, TransformersLlama, llama_experiment),
    },
    "t5": {
        "meshrun": partial(_side, peers.meshrun, Task, t5_experiment),
        "bare compiled": partial(_side, peers.bare_compiled, Plain, t5_experiment),
        "bare transformers compiled": partial(_side, peers.bare_compiled, TransformersT5, t5_experiment),
        "lightning": partial(_side, peers.lightning, TransformersT5, t5_experiment),
    },
    "resnet": {
        "meshrun": partial(_side, peers.meshrun, Task, resnet_experiment),
        "bare compiled": partial(_side, peers.bare_compiled, ReadyImages, resnet_experiment),
        "lightning": partial(_side, peers.lightning, ReadyImages, resnet_experiment),
    },
}
"""Called with whether all is to be tiny."""
PACKAGES = {"fabric": "lightning", "fabric compile": "lightning", "lightning": "lightning", "accelerate": "accelerate"}
MODELS = {
    "llama": "transformers.models.llama.modeling_llama",
    "t5": "transformers.models.t5.modeling_t5",
    "resnet": "torch",
}


def imports_of(part: str, side: str, tiny: bool) -> tuple[str, ...]:
    """What a side imports before its start is timed."""
    of_peer = (PACKAGES[side], MODELS[part]) if side in PACKAGES else ()
    of_model = (MODELS[part],) if "transformers" in side else ()
    compiles = "compile" in side or (side.startswith("meshrun") and not tiny)
    return (*of_peer, *of_model, *(peers.COMPILER if compiles else ()))
