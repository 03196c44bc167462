"""Ways to compute a step that a layout does not have are refused, and others are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshrun import Experiment, cross_entropy
from meshrun.errors import SharedError
from meshrun.layout import parse
from meshrun.parallel.how import How, refuse_how


def of(**fields: Any) -> Experiment:
    return Experiment(
        model=lambda: nn.Linear(2, 2), train=[0], loss=cross_entropy, optimizer=torch.optim.SGD, steps=1, **fields
    )


@pytest.mark.parametrize("layout", ["tp=2", "dp=2,tp=2", "dp=2,fsdp=2", "pp=2,dp=2"])
def test_compressed_gradients_are_for_dp_alone(layout: str):
    with pytest.raises(SharedError, match=r"compress is 'fp16', .* the layout is"):
        refuse_how(of(batch=4), parse(layout), How(compress="fp16"))
    refuse_how(of(batch=4), parse("dp=4"), How(compress="fp16"))
    refuse_how(of(batch=4), parse(layout), How())


def test_offload_needs_shards():
    with pytest.raises(SharedError, match="'dp=2' has no fsdp"):
        refuse_how(of(batch=4), parse("dp=2"), How(offload=True))
    refuse_how(of(batch=4), parse("fsdp=2"), How(offload=True))


@pytest.mark.parametrize(
    ("batch", "micro", "layout", "fits"),
    [
        (6, None, "dp=2", True),
        (6, 3, "dp=2", True),
        (6, 2, "dp=2", False),
        (5, 2, "dp=2", False),
        (5, 3, "dp=2", True),
        (8, 2, "dp=2,fsdp=2", True),
        (6, None, "pp=2", False),
    ],
)
def test_statistics_over_all_ranks_need_the_whole_batch_at_once(batch: int, micro: int | None, layout: str, fits: bool):
    experiment, how = of(batch=batch, micro=micro), How(sync_batchnorm=True)
    refuse_how(experiment, parse(layout), How())
    if fits:
        refuse_how(experiment, parse(layout), how)
    else:
        with pytest.raises(SharedError, match="sync_batchnorm needs the global batch at once"):
            refuse_how(experiment, parse(layout), how)
