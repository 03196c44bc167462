"""What only a run's program knows of its model, written down while it trains: model.json in the run directory.

    record_of(model).write(run)         # rank 0, at the start of a training
    ModelRecord.read(run)               # export, later and elsewhere: nothing of the program is run for it

Export needs the second names of tied weights, and Hugging Face's config and names where the model has these.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from meshrun import strict_json
from meshrun.config import write_json

NAME = "model.json"


@dataclass(frozen=True)
class ModelRecord:
    """A model as other programs need to know it."""

    model: str
    """The name of its class."""
    tied: dict[str, str] = field(default_factory=dict)
    """Second names of weights -> their first."""
    hf_config: dict[str, Any] | None = None
    """Hugging Face's config.json, of a model that has one."""
    hf_names: dict[str, str] = field(default_factory=dict)
    """Names of weights -> those that Hugging Face has for them, where they differ."""

    def hf_name(self, name: str) -> str:
        """What Hugging Face calls a weight."""
        return self.hf_names.get(name, name)

    def write(self, run: Path) -> None:
        write_json(run / NAME, dataclasses.asdict(self))

    @classmethod
    def read(cls, run: Path) -> ModelRecord | None:
        """None where the run has none that can be used."""
        try:
            found = cls(**strict_json.read(run / NAME))
        except (OSError, ValueError, TypeError):
            return None
        names = isinstance(found.model, str) and _are_names(found.tied) and _are_names(found.hf_names)
        return found if names and isinstance(found.hf_config, dict | None) else None


def _are_names(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value.values())


def record_of(model: nn.Module) -> ModelRecord:
    """What is known of a model that was built, with values or without."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (original := first.setdefault(id(parameter), name)) != name:
            tied[name] = original
    from meshrun.recipes import llama

    record = ModelRecord(type(model).__name__, tied)
    if isinstance(model, llama.Llama):
        names = dict(zip(dict(model.named_parameters()), llama.hf_parameters(model), strict=True))
        theirs = {name: their for name, their in names.items() if name != their}
        return dataclasses.replace(record, hf_config=llama.hf_config(model.shape), hf_names=theirs)
    to_json = getattr(getattr(model, "config", None), "to_json_string", None)
    if to_json is None:
        return record
    config = {**strict_json.loads(to_json()), "architectures": [type(model).__name__]}
    return dataclasses.replace(record, hf_config=config)
