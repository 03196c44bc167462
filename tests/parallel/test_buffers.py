"""Running statistics that ranks agree on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from meshrun import mesh
from meshrun.parallel import buffers


@pytest.mark.ranks(2)
def test_statistics_are_the_mean_over_ranks_and_counts_those_of_the_first():
    here = mesh.start()
    mean, count = torch.full((3,), 1.0 + 2 * here.rank), torch.tensor(5 + here.rank)
    part = torch.full((2, 2), float(here.rank))[:, 0]
    buffers.average([mean, count, part], dist.group.WORLD)
    assert mean.tolist() == [2.0] * 3 and count.item() == 5 and part.tolist() == [0.5] * 2
