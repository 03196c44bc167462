"""`meshrun export`: a checkpoint's weights for other programs, from whatever layout it was saved on.

meshrun export runs/llama-1 --to safetensors                  # runs/llama-1/export/step-00000120.safetensors
meshrun export runs/llama-1 --to hf --out my-llama --best     # AutoModelForCausalLM.from_pretrained("my-llama")
meshrun export runs/llama-1/checkpoints/step-00000120 --to torch --out model.pt
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshrun.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from meshrun.state.checkpoint import Checkpoint
    from meshrun.state.export import Rename


class Form(StrEnum):
    """What to export to."""

    SAFETENSORS = "safetensors"
    HF = "hf"
    TORCH = "torch"


ENDINGS = {Form.SAFETENSORS: ".safetensors", Form.HF: "-hf", Form.TORCH: ".pt"}


@dataclass(frozen=True)
class About:
    """What only the run's program knows of its model."""

    tied: dict[str, str] = field(default_factory=dict)
    """Second names of weights."""
    config: dict[str, Any] | None = None
    """Hugging Face's config.json, of a model that has one."""
    rename: Rename = str
    """From the model's own names to Hugging Face's."""
    note: str | None = None


def export_command(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run directory, or a checkpoint in it.")],
    to: Annotated[Form, typer.Option(help="One safetensors file, a Hugging Face folder, or a torch state dict.")],
    out: Annotated[Path | None, typer.Option(help="Where to; export/ in the run directory when absent.")] = None,
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step instead of the last.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The checkpoint that scored best.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> int:
    """Write a checkpoint's weights for other programs."""
    del debug  # for `main`
    if best and step is not None:
        raise UserError(f"--best and --step {step} name two checkpoints; give one of them")
    from meshrun.state import catalog
    from meshrun.state.checkpoint import Checkpoint

    folder = catalog.best(path) if best else catalog.find(path, step)
    checkpoint = Checkpoint.open(folder)
    destination = out or _beside(folder) / f"{folder.name}{ENDINGS[to]}"
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(f"{destination} is there already; remove it, or export to another place (--out)")
    about = _about(folder) if to is not Form.SAFETENSORS else About()
    began = time.perf_counter()
    try:
        written = _export(checkpoint, to, destination, about)
    except OSError as error:
        raise UserError(f"cannot write {destination}: {error.strerror} (--out)") from None
    seconds = time.perf_counter() - began
    result = {"checkpoint": str(folder), "step": checkpoint.step, "to": str(to), "out": str(destination)}
    if as_json:
        print(json.dumps({**result, "bytes": written, "seconds": round(seconds, 3), "note": about.note}))
    else:
        print(f"{destination}: {written / 1e6:,.1f} MB of step {checkpoint.step:,} in {seconds:.1f} s")
        if about.note:
            print(about.note)
    return 0


def _export(checkpoint: Checkpoint, to: Form, destination: Path, about: About) -> int:
    from meshrun.state.export import to_hf, to_safetensors, to_torch

    match to:
        case Form.SAFETENSORS:
            return to_safetensors(checkpoint, destination)
        case Form.HF:
            return to_hf(checkpoint, destination, about.config, about.rename)
        case Form.TORCH:
            return to_torch(checkpoint, destination, about.tied)


def _run_of(folder: Path) -> Path | None:
    """The run directory that a checkpoint is in."""
    run = folder.absolute().parent.parent
    return run if (run / "config.json").is_file() else None


def _beside(folder: Path) -> Path:
    return (_run_of(folder) or folder.parent) / "export"


def _about(folder: Path) -> About:
    """Ask the run's program for its model, which costs no memory: it is built without values."""
    from meshrun.cli.target import find, make
    from meshrun.config import RunDirectory

    run = _run_of(folder)
    if run is None:
        return About(note=f"{folder} is in no run directory: tied weights and config.json are not known")
    config = RunDirectory(run).config()
    try:
        model = _model(make(find(config.target), config.options, config.data).model)
    except Exception as error:
        # The weights are all there; the program may need a machine, or files, that are not here.
        return About(note=f"the model of {config.target} cannot be built here ({error}): config.json is not written")
    return _of_model(model)


def _model(make_model: Any) -> nn.Module:
    import torch

    with torch.device("meta"):
        return make_model()


def _of_model(model: nn.Module) -> About:
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (original := first.setdefault(id(parameter), name)) != name:
            tied[name] = original
    from meshrun.recipes import llama

    if isinstance(model, llama.Llama):
        names = dict(zip(dict(model.named_parameters()), llama.hf_parameters(model), strict=True))
        dtype = str(model.embed.weight.dtype).removeprefix("torch.")
        return About(tied, {**llama.hf_config(model.shape), "torch_dtype": dtype}, lambda name: names.get(name, name))
    to_json = getattr(getattr(model, "config", None), "to_json_string", None)
    if to_json is None:
        return About(tied, note=f"{type(model).__name__} has no config of Hugging Face's: config.json is not written")
    return About(tied, {**json.loads(to_json()), "architectures": [type(model).__name__]})
