import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrun.parallel.dtensor import is_dtensor


@pytest.fixture
def split() -> Tensor:
    """What a mesh of one rank holds of a matrix."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield distribute_tensor(torch.eye(3), init_device_mesh("cpu", (1,)), [Shard(0)])
    dist.destroy_process_group()


def test_dtensors_are_told_from_plain_tensors(split: Tensor):
    assert is_dtensor(split) and is_dtensor(nn.Parameter(split)) and is_dtensor(split * 2)
    plain = torch.eye(3)
    assert not any(map(is_dtensor, (None, plain, nn.Parameter(plain), nn.Buffer(plain), plain.to("meta"), {})))


def test_a_compiler_can_follow_the_question(split: Tensor):
    layer = nn.Linear(3, 3, bias=False)
    layer.other = nn.Parameter(split)

    def doubled(inputs: Tensor) -> Tensor:
        return inputs * 2 if is_dtensor(layer.other) and not is_dtensor(layer.weight) else inputs

    assert torch.compile(doubled, backend="eager", fullgraph=True)(torch.ones(3)).tolist() == [2, 2, 2]
