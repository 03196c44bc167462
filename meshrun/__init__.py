"""meshrun starts training: the same model to the same losses on one device or a thousand.

The public names. Each is imported when it is first asked for, so that `import meshrun` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshrun.data.augment import random_crop, random_flip
    from meshrun.data.padding import padded
    from meshrun.data.sources.folder import ImageFolder
    from meshrun.data.sources.hdf5 import Hdf5
    from meshrun.data.sources.tables import Table
    from meshrun.data.sources.tokens import TokenFile
    from meshrun.data.staging import Stage, staged
    from meshrun.errors import BadSample, RunFailed, UserError
    from meshrun.experiment import Experiment, Loss, Schedule
    from meshrun.mesh import Here, finish, start
    from meshrun.train.by_sample import randn_like
    from meshrun.train.loop import Trainer
    from meshrun.train.losses import accuracy, cross_entropy, mean_squared_error, perplexity, token_cross_entropy
    from meshrun.train.own import (
        barrier,
        broadcast,
        gather,
        gather_rows,
        mean_over_ranks,
        print0,
        replicate,
        save0,
        shard,
        unwrap,
    )
    from meshrun.train.totals import Update

__version__ = "0.1.0"

_HOMES = {
    "meshrun.data.augment": ("random_crop", "random_flip"),
    "meshrun.data.padding": ("padded",),
    "meshrun.data.sources.folder": ("ImageFolder",),
    "meshrun.data.sources.hdf5": ("Hdf5",),
    "meshrun.data.sources.tables": ("Table",),
    "meshrun.data.sources.tokens": ("TokenFile",),
    "meshrun.data.staging": ("Stage", "staged"),
    "meshrun.errors": ("BadSample", "RunFailed", "UserError"),
    "meshrun.experiment": ("Experiment", "Loss", "Schedule"),
    "meshrun.mesh": ("Here", "finish", "start"),
    "meshrun.train.loop": ("Trainer",),
    "meshrun.train.totals": ("Update",),
    "meshrun.train.losses": ("accuracy", "cross_entropy", "mean_squared_error", "perplexity", "token_cross_entropy"),
    "meshrun.train.by_sample": ("randn_like",),
    "meshrun.train.own": (
        *("barrier", "broadcast", "gather", "gather_rows", "mean_over_ranks", "print0", "replicate", "save0", "shard"),
        "unwrap",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BadSample",
    "Experiment",
    "Hdf5",
    "Here",
    "ImageFolder",
    "Loss",
    "RunFailed",
    "Schedule",
    "Stage",
    "Table",
    "TokenFile",
    "Trainer",
    "Update",
    "UserError",
    "__version__",
    "accuracy",
    "barrier",
    "broadcast",
    "cross_entropy",
    "finish",
    "gather",
    "gather_rows",
    "mean_over_ranks",
    "mean_squared_error",
    "padded",
    "perplexity",
    "print0",
    "randn_like",
    "random_crop",
    "random_flip",
    "replicate",
    "save0",
    "shard",
    "staged",
    "start",
    "token_cross_entropy",
    "unwrap",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'meshrun' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
