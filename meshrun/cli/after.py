"""What an experiment wants done once its training is kept: `Experiment.after`, on rank 0, when the others have left.

    finish_with(experiment, run, result, record, device)                   # the result with `after` in it
    model = trained_model(experiment, run, "best", torch.device("cpu"))    # built anew, in evaluation mode

By then weights, result and report are on disk and the group of ranks is taken apart: what the function does may take
its time, and an error in it is a note.
"""

from __future__ import annotations

import contextlib
import gc
import io
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from meshrun import strict_json
from meshrun.config import RunDirectory, write_json
from meshrun.errors import RunFailed, UserError, described
from meshrun.experiment import Experiment
from meshrun.state.weights import load_weights

Which = Literal["best", "last"]


def trained_model(experiment: Experiment, run: RunDirectory, which: Which, device: torch.device) -> nn.Module:
    """The model with the weights that a run has kept; the last ones where no evaluation has chosen any as the best."""
    paths = [run.weights / f"{name}.safetensors" for name in ("best", "last") if which in (name, "best")]
    path = next((each for each in paths if each.is_file()), None)
    if path is None:
        raise UserError(
            f"{run.path} has no weights yet ({paths[-1]}): they are kept after the first evaluation, and at the end"
        )
    model = experiment.model()
    load_weights(model, path)
    # What is drawn from here on is the same whenever this is called.
    torch.manual_seed(experiment.seed)
    return model.to(device).eval()


def finish_with(
    experiment: Experiment, run: RunDirectory, result: dict[str, Any], record: Callable[..., None], device: torch.device
) -> dict[str, Any]:
    """Call `experiment.after`, tell what it printed, and write what it returned into the result."""
    assert experiment.after is not None
    gc.collect()  # the trainer's model and optimizer, which hold each other
    if device.type == "cuda":
        torch.cuda.empty_cache()
    printed, values = _Printed(), None
    why: BaseException | None = None
    try:
        with contextlib.redirect_stdout(printed):
            values = _values(experiment.after(trained_model(experiment, run, "best", device), run.path))
    except (Exception, SystemExit) as error:
        why = error
    record("after", text=printed.getvalue(), values=values)
    if why is not None:
        record(
            "note",
            text=f"what was to be done after the training failed{where_and_why(why)}; the training itself is kept",
        )
    result = {**result, "after": values}
    try:
        write_json(run.path / "result.json", result)
    except OSError as error:
        raise RunFailed(
            f"the result of the training is kept, but not what was done after it: cannot write "
            f"{run.path / 'result.json'}: {error.strerror}"
        ) from error
    return result


class _Printed(io.StringIO):
    """What a program prints, also of one that closes its standard output."""

    def close(self) -> None:
        pass


def _values(returned: Any) -> dict[str, Any] | None:
    if returned is None:
        return None
    if not isinstance(returned, Mapping):
        raise TypeError(f"it returned {type(returned).__name__}; it must return a dict of values, or None")
    found: dict[str, Any] = as_json(returned)
    strict_json.dumps(found)  # a ValueError for whole numbers of too many digits, which no document can hold
    return found


def as_json(value: Any) -> Any:
    """A value as a document can hold it: tensors and arrays as lists."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(each) for each in value]
    if hasattr(value, "tolist"):
        return as_json(value.tolist())
    return str(value)


def where_and_why(error: BaseException) -> str:
    """The innermost line that is not a library's, and what went wrong there; our own sentences need none."""
    if isinstance(error, UserError | RunFailed):
        return f": {error}"
    own = [each for each in traceback.extract_tb(error.__traceback__) if "-packages" not in each.filename]
    line = f" in {own[-1].filename}:{own[-1].lineno}" if own and own[-1].filename != __file__ else ""
    return f"{line}: {described(error)}"
