"""The axis tp: matrices are split over ranks, and each computes with its part.

    plan = plan_for(model, experiment.tensor_plan)      # {"blocks.*.attention.wq": "colwise", …} and where it is from
    check(model, plan, ranks=4)                         # refuses what cannot be split, before any process exists
    apply(model, plan, mesh, vocabulary_loss=True)

A plan names modules, `*` stands for any part of a name between dots, and gives each a style:

    colwise             a Linear split by its outputs; what follows computes with a part of the features
    rowwise             a Linear split by its inputs; results are summed over ranks
    colwise_gather      a colwise Linear whose outputs are put together again (an output layer)
    embedding           an Embedding split by its vocabulary
    rowwise_scatter, embedding_scatter
                        the same, but each rank keeps only its part of the sequence of the result
    sequence            a norm or dropout that works on its rank's part of the sequence
    gather              a module whose first argument is put together from the parts of the sequence
    head                an output layer that gathers the sequence and leaves its outputs split by the vocabulary for the
                        loss, so that no rank holds all of them
    features            a dropout between a colwise and a rowwise layer
    heads               an nn.MultiheadAttention, split by its heads

Without a plan from the user or from the model (Hugging Face models ship one), torch's own transformer layers and
sequences of Linear, activation, Linear are found. What no plan covers stays whole on every rank.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

from meshrun.errors import UserError
from meshrun.parallel.attention import split_heads
from meshrun.parallel.dropout import KeyedDropout

SPLIT_OUTPUTS = ("colwise", "colwise_gather", "head")
SPLIT_INPUTS = ("rowwise", "rowwise_scatter")
SPLIT_VOCABULARY = ("embedding", "embedding_scatter")
ALONG_SEQUENCE = ("sequence", "gather", "head", "rowwise_scatter", "embedding_scatter")
_SUMMED_OR_GATHERED = (*SPLIT_INPUTS, *SPLIT_VOCABULARY, "colwise_gather", "head")
STYLES = (*SPLIT_OUTPUTS, *SPLIT_INPUTS, *SPLIT_VOCABULARY, "sequence", "gather", "features", "heads")

# What Hugging Face's plans call these; what it has beyond them is for mixtures of experts and stays whole here.
HUGGING_FACE = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_rep": "colwise_gather",
    "colwise_gather_output": "colwise_gather",
    "embedding_rowwise": "embedding",
    "vocab_parallel_rowwise": "embedding",
}
_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size")


@dataclass(frozen=True)
class Plan:
    """Module -> style, for the modules of one model; `source` says where it is from."""

    styles: dict[str, str]
    source: str

    def whole(self, model: nn.Module) -> list[str]:
        """Modules with matrices that the plan does not split."""
        split = {name for name, style in self.styles.items() if style not in ("gather", "sequence", "features")}
        return [
            name
            for name, module in model.named_modules()
            if any(each.dim() > 1 for each in module.parameters(recurse=False))
            and not any(name == each or name.startswith(f"{each}.") for each in split)
        ]

    def note(self, model: nn.Module) -> str:
        """What to tell the user of it."""
        if not self.styles:
            nothing = "no plan covers this model, so every rank holds and computes all of it"
            return f"tp: {nothing} (Experiment(tensor_plan=…))"
        if whole := self.whole(model):
            named = ", ".join(whole[:4]) + (f" and {len(whole) - 4} more" if len(whole) > 4 else "")
            return f"tp by {self.source}: whole on every rank are {named}"
        return f"tp by {self.source}"


def plan_for(model: nn.Module, given: Mapping[str, str] | None) -> Plan:
    """The user's plan, else the model's own, else one made from the layers that are known."""
    if given is not None:
        return Plan(_matched(model, given, "tensor_plan"), "tensor_plan")
    shipped = _shipped(model)
    if shipped:
        return Plan(_matched(model, shipped, "the plan that the model ships"), "the model's own plan")
    return Plan(_found(model), "torch's transformer layers and MLPs")


def _matched(model: nn.Module, given: Mapping[str, str], source: str) -> dict[str, str]:
    names = [name for name, _ in model.named_modules() if name]
    styles: dict[str, str] = {}
    for pattern, style in given.items():
        if style not in STYLES:
            raise UserError(f"{source} gives {pattern!r} the style {style!r}; styles are {', '.join(STYLES)}")
        found = _named_by(pattern.removesuffix(".weight"), names)
        if not found:
            near = fnmatch.filter(names, f"*{pattern.rpartition('.')[2]}")[:3] or names[:3]
            raise UserError(f"{source} names {pattern!r}, which is no module of the model; it has {', '.join(near)}, …")
        styles |= dict.fromkeys(found, style)
    return styles


def _named_by(pattern: str, names: list[str]) -> list[str]:
    """The names that a pattern stands for; `*` is any part of a name between dots."""
    shape = re.compile("[^.]+".join(map(re.escape, pattern.split("*"))))
    return [name for name in names if shape.fullmatch(name)]


def _shipped(model: nn.Module) -> dict[str, str]:
    """A Hugging Face model's plan, under the names that its modules have in this model."""
    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        plan |= {
            f"{prefix}{pattern}": HUGGING_FACE[style]
            for pattern, style in (getattr(module, "_tp_plan", None) or {}).items()
            if style in HUGGING_FACE
        }
    names = [name for name, _ in model.named_modules()]
    return {pattern: style for pattern, style in plan.items() if _named_by(pattern, names)}


def _found(model: nn.Module) -> dict[str, str]:
    styles: dict[str, str] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            styles |= {f"{prefix}linear1": "colwise", f"{prefix}dropout": "features", f"{prefix}linear2": "rowwise"}
        elif isinstance(module, nn.MultiheadAttention):
            styles[name] = "heads"
        elif isinstance(module, nn.Sequential):
            styles |= _mlp(prefix, list(module.named_children()))
    return styles


def _mlp(prefix: str, children: list[tuple[str, nn.Module]]) -> dict[str, str]:
    """Linear, something without parameters, Linear: the first by its outputs, the second by its inputs."""
    styles: dict[str, str] = {}
    place = 0
    while place < len(children):
        name, first = children[place]
        end = place + 1
        while end < len(children) and _is_pointwise(children[end][1]):
            end += 1
        if isinstance(first, nn.Linear) and place + 1 < end < len(children) and isinstance(children[end][1], nn.Linear):
            styles |= {f"{prefix}{name}": "colwise", f"{prefix}{children[end][0]}": "rowwise"}
            between = children[place + 1 : end]
            styles |= {f"{prefix}{each}": "features" for each, module in between if isinstance(module, nn.Dropout)}
            place = end
        place += 1
    return styles


def _is_pointwise(module: nn.Module) -> bool:
    """Whether a module treats each feature by itself."""
    kinds = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Dropout, nn.ReLU6, nn.Mish)
    return isinstance(module, (*kinds, nn.Softplus, nn.Hardswish, nn.Identity))


def check(model: nn.Module, plan: Plan, ranks: int) -> None:
    """Refuse a plan that these many ranks cannot share, in a sentence."""
    for name, style in plan.styles.items():
        module = model.get_submodule(name)
        if style in SPLIT_OUTPUTS + SPLIT_INPUTS + SPLIT_VOCABULARY:
            kind = nn.Embedding if style in SPLIT_VOCABULARY else nn.Linear
            if not isinstance(module, kind):
                raise UserError(
                    f"{plan.source} gives {name!r} the style {style!r}, which needs torch.nn.{kind.__name__}, "
                    f"but this is {type(module).__module__}.{type(module).__qualname__}"
                )
        if isinstance(module, nn.MultiheadAttention):
            _divides(module.num_heads, ranks, f"{name!r} has {module.num_heads} heads")
        elif isinstance(module, nn.Linear) and style in SPLIT_OUTPUTS:
            head = _head_size(model, name)
            if head and style == "colwise":
                heads = module.out_features // head
                _divides(heads, ranks, f"{name!r} has {heads} heads of {head}")
            _divides(module.out_features, ranks, f"{name!r} has {module.out_features} outputs")
        elif isinstance(module, nn.Linear) and style in SPLIT_INPUTS:
            _divides(module.in_features, ranks, f"{name!r} has {module.in_features} inputs")
        elif isinstance(module, nn.Embedding):
            _divides(module.num_embeddings, ranks, f"{name!r} has {module.num_embeddings} entries")


def _head_size(model: nn.Module, name: str) -> int | None:
    """The size of a head, where the module around a matrix says so."""
    parent = model.get_submodule(name.rpartition(".")[0])
    sizes = [getattr(parent, each, None) for each in _HEAD_SIZES]
    return next((size for size in sizes if isinstance(size, int)), None)


def _divides(number: int, ranks: int, what: str) -> None:
    if number % ranks:
        fitting = [each for each in range(ranks - 1, 1, -1) if number % each == 0]
        advice = f"tp={fitting[0]} would do" if fitting else "use another axis"
        raise UserError(f"{what}, which tp={ranks} does not divide; {advice} (--layout)")


def apply(model: nn.Module, plan: Plan, mesh: DeviceMesh, part: int, vocabulary_loss: bool) -> None:
    """Split a model whose parameters may still be on the meta device."""
    styles: dict[str, str] = {}
    for name, style in plan.styles.items():
        module = model.get_submodule(name)
        if not any(True for _ in module.parameters()) and not isinstance(module, KeyedDropout) and style != "gather":
            continue  # on another stage
        if style == "heads":
            assert isinstance(module, nn.MultiheadAttention)
            split_heads(module, mesh)
        elif isinstance(module, KeyedDropout):
            if style == "sequence":
                module.part_of_sequence = (part, mesh.size())
            elif style == "features":
                module.part_of_features = (part, mesh.size())
        elif style != "features":
            styles[name] = style
    if styles:
        from meshrun.parallel.tp_styles import parallelize  # slow to import, and only to split

        parallelize(model, mesh, styles, vocabulary_loss)
    for name, style in styles.items():
        if style in _SUMMED_OR_GATHERED:
            model.get_submodule(name).register_forward_hook(_waited_for)


def _waited_for(_: nn.Module, __: Any, outputs: Any) -> None:
    """Wait for what is sent here and now, and not when it is first used.

    A segment that is computed again stops at the last tensor that its backward pass needs: often between this and its
    first use (a dropout needs its mask only). What nobody ever waits for torch would keep until the process ends.
    """
    if isinstance(outputs, AsyncCollectiveTensor):
        outputs.trigger_wait()
