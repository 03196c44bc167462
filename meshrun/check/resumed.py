"""Resumes the trainings of `verify` from the checkpoints that they saved on their way.

    resume(experiment, here, probing, alone.folder, 0)       # on every rank: trains the last steps again
    for resumption in Resumption.all_in(folder): ...         # elsewhere, later: what came of it

Each layout goes on from its own checkpoint and from that of one process; then one process goes on from the layout's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path

from meshrun import strict_json
from meshrun.check.probe import CHECKPOINTS, WEIGHTS, Found, Probing
from meshrun.check.verify import Allowed, Measured, Verdict, judge, measure
from meshrun.config import write_json
from meshrun.errors import SharedError
from meshrun.experiment import Experiment
from meshrun.mesh import Here
from meshrun.state.weights import save_weights
from meshrun.train.interval import Every
from meshrun.train.loop import Trainer
from meshrun.train.recovery import Keeping

RESUMED, RESUMPTION = "resumed", "resumption.json"


@dataclass(frozen=True)
class Resumption:
    """A training that began with a checkpoint."""

    saved_on: str
    resumed_on: str
    step: int
    failure: str | None
    """Why the checkpoint could not be resumed from."""
    losses: list[float]
    grad_norms: list[float]

    def __str__(self) -> str:
        return f"resuming on {self.resumed_on} from the checkpoint of step {self.step:,}, saved on {self.saved_on}"

    @classmethod
    def all_in(cls, folder: Path) -> dict[Path, Resumption]:
        """Those of one layout, by the folder that holds their weights."""
        files = sorted((folder / RESUMED).glob(f"*/{RESUMPTION}"))
        return {file.parent: cls(**strict_json.loads(file.read_text())) for file in files}

    def compared(self, reference: Found, found: Found, folders: tuple[Path, Path], allowed: Allowed) -> Compared:
        """Hold this training against one process, as the one that was never stopped (`found`) is held against it."""
        whole = replace(found, losses=self.losses, grad_norms=self.grad_norms)
        measured = measure(reference, whole, folders)
        return Compared(self, measured, judge(measured, allowed))


@dataclass(frozen=True)
class Compared:
    """A resumed training against one process."""

    resumption: Resumption
    measured: Measured
    verdict: Verdict

    @property
    def cause(self) -> str | None:
        """A sentence for a training that is another one after it was resumed."""
        if self.verdict.ok:
            return None
        verdict = self.verdict
        where = [f"step {verdict.first_step}"] * bool(verdict.first_step)
        where += [f"parameter {verdict.first_parameter}"] * bool(verdict.first_parameter)
        return (
            f"{self.resumption}, changes the training (losses {self.measured.loss:.1e}, weights "
            f"{self.measured.weight:.1e} apart, first at {', '.join(where) or 'its end'}): the program keeps something "
            f"that is no parameter, buffer or optimizer state, such as an attribute that its forward pass changes"
        )


def resume(experiment: Experiment, here: Here, probing: Probing, source: Path, number: int) -> None:
    """Train the last steps again, from the checkpoint of the training in `source`; rank 0 writes what came of it."""
    saved = Found.read(source)
    if saved.unsaved is not None or saved.saved is None:
        return
    trainer = Trainer(
        replace(experiment, evals={}),
        here,
        workers=0,
        lr_scale=probing.lr_scale,
        how=replace(probing.how, torchao=False, offload=probing.how.offload and here.size > 1),
        keeping=Keeping(source / CHECKPOINTS, every=Every(never=True)),
    )
    failure = _resumed(trainer)
    weights = {name: tensor.clone() for name, tensor in trainer.placed.weights()}
    if here.rank == 0:
        folder = probing.folder / RESUMED / str(number)
        folder.mkdir(parents=True)
        save_weights(weights, folder / WEIGHTS, {})
        totals = trainer.totals
        resumption = Resumption(saved.layout, str(here.layout), saved.saved, failure, totals.losses, totals.grad_norms)
        write_json(folder / RESUMPTION, dataclasses.asdict(resumption))


def _resumed(trainer: Trainer) -> str | None:
    """Train on from the newest checkpoint; returns why not, if there is a reason."""
    try:
        if trainer.resume() is None:
            return "there is no checkpoint"
    except SharedError as error:
        return str(error)
    for _ in trainer.steps():
        pass
    trainer.placed.agree_on_buffers()
    return None
