"""Model weights as safetensors files: no pickle, so that reading one can run no code.

save_weights(dict(model.named_parameters()), Path("best.safetensors"), {"step": 120, "loss": 0.07})
load_weights(model, Path("best.safetensors"))
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_file
from torch import Tensor, nn

from meshrun import strict_json
from meshrun.errors import UserError
from meshrun.files import new_file


def save_weights(weights: Mapping[str, Tensor], path: Path, about: Mapping[str, Any]) -> None:
    """Write the weights under the model's own names; tied ones are there once."""
    save_tensors({name: _alone(tensor) for name, tensor in weights.items()}, path, about)


def _alone(tensor: Tensor) -> Tensor:
    """A tensor that has its memory for itself: in such a file two may not share any."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() else tensor.clone()


def save_tensors(tensors: dict[str, Tensor], path: Path, about: Mapping[str, Any]) -> None:
    """Write tensors under the names given."""
    with whole(path) as beside:
        try:
            save_file(tensors, beside, metadata=_texts(about))
        except SafetensorError as error:
            # safetensors says in a text what the system has refused; who waits for a disk expects an OSError.
            if refused := re.search(r"os error (\d+)", str(error)):
                raise OSError(int(refused[1]), os.strerror(int(refused[1])), str(path)) from error
            raise


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A name to write to; what was written is flushed and renamed: the file is the old or the new one, whole."""
    # A name that nobody guesses: where others may write, a link under it would lead to a file of their choice.
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new_file(beside).close()
        mode = beside.stat().st_mode  # by the umask, and not for its owner alone as safetensors makes it
        yield beside
        beside.chmod(mode)
        with beside.open("rb") as written:
            os.fsync(written.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _texts(about: Mapping[str, Any]) -> dict[str, str]:
    # One entry: safetensors itself adds others, with the names of tied weights.
    return {"about": strict_json.dumps(dict(about))}


def load_weights(model: nn.Module, path: Path) -> dict[str, Any]:
    """Read weights into a model of the same shape; returns what was written about them."""
    try:
        with safe_open(path, framework="pt") as file:
            said = strict_json.loads((file.metadata() or {}).get("about", "{}"))
            about: dict[str, Any] = strict_json.of_type(dict, said, "about")
        load_model(model, path)
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"cannot read weights from {path}: {error}") from None
    except RuntimeError as error:
        raise UserError(f"the weights in {path} are of another model: {' '.join(str(error).split())}") from None
    return about
