"""The styles of a tensor plan, as torch's DTensors know them: what `tp.apply` does to the modules of a plan.

    parallelize(model, mesh, {"blocks.0.attention.wq": "colwise"}, vocabulary_loss=True)

A file of its own since DTensors are slow to import, while plans are looked at where nothing is split too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def parallelize(model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, str], vocabulary_loss: bool) -> None:
    """Split the named modules, each in its style."""
    parallelize_module(model, mesh, {name: _style(style, vocabulary_loss) for name, style in styles.items()})


def _style(style: str, vocabulary_loss: bool) -> ParallelStyle:
    # Dim 1 of activations is the sequence.
    sequence = Shard(1)
    match style:
        case "colwise":
            return ColwiseParallel()
        case "colwise_gather":
            return ColwiseParallel(output_layouts=Replicate())
        case "head" if vocabulary_loss:
            return ColwiseParallel(input_layouts=sequence, output_layouts=Shard(-1), use_local_output=False)
        case "head":
            return ColwiseParallel(input_layouts=sequence, output_layouts=Replicate())
        case "rowwise":
            return RowwiseParallel()
        case "rowwise_scatter":
            return RowwiseParallel(output_layouts=sequence)
        case "embedding":
            return RowwiseParallel(input_layouts=Replicate())
        case "embedding_scatter":
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence)
        case "sequence":
            return SequenceParallel(use_local_output=True)
        case _:
            return _Gather()


class _Gather(ParallelStyle):
    """The first argument is put together along the sequence.

    It stays a DTensor, so that its gradient is summed once, however many layers of the module use it.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gathered(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
            def put_together(part: Tensor) -> Tensor:
                return DTensor.from_local(part, device_mesh, [Shard(1)], run_check=False).redistribute(
                    placements=[Replicate()]
                )

            if inputs:
                return (put_together(inputs[0]), *inputs[1:]), named
            first = next(iter(named))
            return inputs, {**named, first: put_together(named[first])}

        module.register_forward_pre_hook(gathered, with_kwargs=True)
        return module
