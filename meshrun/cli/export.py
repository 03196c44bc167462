"""`meshrun export`: a checkpoint's weights for other programs, from whatever layout it was saved on.

meshrun export runs/llama-1 --to safetensors                  # runs/llama-1/export/step-00000120.safetensors
meshrun export runs/llama-1 --to hf --out my-llama --best     # AutoModelForCausalLM.from_pretrained("my-llama")
meshrun export runs/llama-1/checkpoints/step-00000120 --to torch --out model.pt
"""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshrun import strict_json
from meshrun.errors import UserError, printable

if TYPE_CHECKING:
    from torch import nn

    from meshrun.cli.model_record import ModelRecord
    from meshrun.state.checkpoint import Checkpoint


class Form(StrEnum):
    """What to export to."""

    SAFETENSORS = "safetensors"
    HF = "hf"
    TORCH = "torch"


ENDINGS = {Form.SAFETENSORS: ".safetensors", Form.HF: "-hf", Form.TORCH: ".pt"}


def export_command(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run directory, or a checkpoint in it.")],
    to: Annotated[Form, typer.Option(help="One safetensors file, a Hugging Face folder, or a torch state dict.")],
    out: Annotated[Path | None, typer.Option(help="Where to; export/ in the run directory when absent.")] = None,
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step instead of the last.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The checkpoint that scored best.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    run_program: Annotated[
        bool, typer.Option("--run-program", help="Run the program that the run names, to learn of its model.")
    ] = False,
) -> int:
    """Write a checkpoint's weights for other programs."""
    del debug  # for `main`
    if best and step is not None:
        raise UserError(f"--best and --step {step} name two checkpoints; give one of them")
    from meshrun.state import catalog
    from meshrun.state.checkpoint import Checkpoint

    folder = catalog.best(path) if best else catalog.find(path, step)
    with catalog.refusing_deleted(folder):
        checkpoint = Checkpoint.open(folder)
    destination = out or _beside(folder) / f"{folder.name}{ENDINGS[to]}"
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(f"{destination} is there already; remove it, or export to another place (--out)")
    record, why = _described(folder, run_program) if to is not Form.SAFETENSORS else (None, "")
    note = _note(to, record, why)
    began = time.perf_counter()
    try:
        with catalog.refusing_deleted(folder):
            written = _export(checkpoint, to, destination, record)
    except OSError as error:
        raise UserError(f"cannot write {destination}: {error.strerror} (--out)") from None
    seconds = time.perf_counter() - began
    result = {"checkpoint": str(folder), "step": checkpoint.step, "to": str(to), "out": str(destination)}
    if as_json:
        print(strict_json.dumps({**result, "bytes": written, "seconds": round(seconds, 3), "note": note}))
    else:
        print(f"{destination}: {written / 1e6:,.1f} MB of step {checkpoint.step:,} in {seconds:.1f} s")
        if note:
            print(printable(note))  # with names from files that anybody may have written
    return 0


def _export(checkpoint: Checkpoint, to: Form, destination: Path, record: ModelRecord | None) -> int:
    from meshrun.state.export import to_hf, to_safetensors, to_torch

    match to:
        case Form.SAFETENSORS:
            return to_safetensors(checkpoint, destination)
        case Form.HF if record is not None:
            return to_hf(checkpoint, destination, _hf_config(record, checkpoint), record.hf_name)
        case Form.HF:
            return to_hf(checkpoint, destination)
        case Form.TORCH:
            return to_torch(checkpoint, destination, record.tied if record is not None else None)


def _hf_config(record: ModelRecord, checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The recorded config; a recipe's names no type, and gets the one that its weights were saved in."""
    if record.hf_config is None:
        return None
    kind = next(str(info.dtype) for name, info in checkpoint.tensors.items() if name.startswith("model/"))
    return {"torch_dtype": kind.removeprefix("torch."), **record.hf_config}


def _run_of(folder: Path) -> Path | None:
    """The run directory that a checkpoint is in."""
    run = folder.absolute().parent.parent
    return run if (run / "config.json").is_file() else None


def _beside(folder: Path) -> Path:
    """The usual place; where it is a link, whoever has made the run directory would choose the place."""
    usual = (_run_of(folder) or folder.parent) / "export"
    if usual.is_symlink():
        raise UserError(f"{usual} is a link, which is not followed; give a place (--out)")
    return usual


def _described(folder: Path, run_program: bool) -> tuple[ModelRecord | None, str]:
    """What is known of the model beside its weights, and what to tell the user where nothing is.

    A run directory may come from anybody: the program that its config.json names is run only if the user says so.
    """
    from meshrun.cli.command import refuse_changeable
    from meshrun.cli.model_record import ModelRecord, record_of
    from meshrun.cli.target import find, make
    from meshrun.config import RunDirectory

    run = _run_of(folder)
    if run is None:
        return None, f"{folder} is in no run directory"
    if run_program:
        refuse_changeable(run)
    record = ModelRecord.read(run)
    if record is not None and not run_program:
        return record, ""
    try:
        config = RunDirectory(run).config()
        target = find(config.target)
        if target.recipe or run_program:
            return record_of(_model(make(target, config.options, config.data).model)), ""
    except Exception as error:
        # The weights are all there; the program may need a machine, or files, that are not here.
        return None, f"the model of {run} cannot be built here ({error})"
    return None, f"{run} has no model.json; --run-program builds the model by running {config.target}"


def _model(make_model: Any) -> nn.Module:
    import torch

    with torch.device("meta"):
        return make_model()


def _note(to: Form, record: ModelRecord | None, why: str) -> str | None:
    """What the export lacks, and why."""
    if record is None and to is Form.TORCH:
        return f"second names of tied weights, should the model have any, are left out: {why}"
    if record is None and to is Form.HF:
        return f"config.json is not written: {why}"
    if record is not None and record.hf_config is None and to is Form.HF:
        return f"config.json is not written: {record.model} is no Hugging Face model"
    return None
