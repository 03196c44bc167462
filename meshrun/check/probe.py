"""What a rank does for `meshrun verify`: train the user's program, and write down all that may be compared.

    found = probe(experiment, here, Probing(folder=run.path))     # on every rank
    Found.read(run.path)                                          # elsewhere, later

Rank 0 writes `found.json`, beside it `weights.safetensors`; all ranks save a checkpoint on the way, if asked to. In one
process it also writes `largest.safetensors`, each element's largest gradient, and tries what the usual mistakes are
found by (`Tried`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import Subset, default_collate

from meshrun import strict_json
from meshrun.check.draws import find_draws
from meshrun.check.nan_safe import exceeds
from meshrun.config import write_json
from meshrun.data.draws import SampleDraws
from meshrun.data.feed import to_device
from meshrun.data.order import Order
from meshrun.data.permutation import Ids
from meshrun.data.samples import Samples, Wanted
from meshrun.data.seeding import put_back, seed_with, snapshot, word_for
from meshrun.experiment import Experiment, MapDataset, sample_of
from meshrun.mesh import Here
from meshrun.parallel.compiled import steps_of
from meshrun.parallel.dp import Replicated
from meshrun.parallel.how import How
from meshrun.parallel.placed import Placed, as_real, call, computing
from meshrun.state.weights import save_weights
from meshrun.train.interval import Every
from meshrun.train.loop import Record, Trainer
from meshrun.train.recovery import Keeping
from meshrun.train.step import as_pair

EVALUATED = 1024
"""Samples of each evaluation set that are evaluated: enough to be uneven on any mesh, and soon done."""
REMEMBERED = 4096
"""Samples of the training set whose contents are compared."""
TRIED = 32
"""Most samples of the batch on which the loss and the model are tried by themselves."""

FOUND, WEIGHTS, LARGEST = "found.json", "weights.safetensors", "largest.safetensors"
CHECKPOINTS = "checkpoints"
REPEATED = 3
"""Most steps that are left after the checkpoint, for a resumed training to compute again."""


@dataclass(frozen=True)
class Tried:
    """What one process has found out about the program itself, apart from the training."""

    draws: list[str] = field(default_factory=list)
    """Random numbers that the model draws by itself."""
    batchnorms: list[str] = field(default_factory=list)
    """Modules whose statistics are those of a micro-batch."""
    collate_draws: bool = False
    """Whether making a batch of samples draws random numbers."""
    augment_draws: bool = False
    """Whether Experiment(augment=…) draws other random numbers than those that it is given."""
    mixes: bool = False
    """Whether a sample's inputs are others beside other samples."""
    changing_eval: str | None = None
    """An evaluation set of which a sample was not the same when it was read again."""
    loss: str = "sum"
    """What the loss of a batch is to those of its parts: their sum, their mean, or other."""


@dataclass(frozen=True)
class Found:
    """What one training left to compare."""

    layout: str
    world: int
    replicas: int
    losses: list[float]
    grad_norms: list[float]
    gradients: list[dict[str, float]]
    """A step's norm of each parameter's gradient, before clipping."""
    evals: dict[str, dict[str, float]]
    length: int
    """Samples in the training set."""
    ids: str
    """A hash of the numbers of all samples that ranks trained on, in order."""
    samples: dict[str, str]
    """A hash of what was read, by the sample's number, and by its seed where it has drawn."""
    unstable: list[int]
    """Samples that were not the same when they were read again."""
    pieces: list[int]
    """The sizes of the first replica's micro-batches in the first step."""
    factors: list[list[float]]
    """By how much the optimizer itself has scaled the gradients that a rank holds, at every step."""
    torn: list[str]
    """Parameters that differ between ranks that should hold the same."""
    sync_batchnorm: bool = False
    saved: int | None = None
    """The step of the checkpoint, where one was saved."""
    unsaved: str | None = None
    """Why it could not be."""
    tried: Tried = field(default_factory=Tried)

    @property
    def loss_of_checkpoint(self) -> str | None:
        """A sentence for a checkpoint that could not be kept."""
        return self.unsaved and f"the checkpoint of step {self.saved} was not kept on {self.layout}: {self.unsaved}"

    @classmethod
    def read(cls, folder: Path) -> Found:
        values = strict_json.loads((folder / FOUND).read_text())
        return cls(**{**values, "tried": Tried(**values["tried"])})


class Backwards(Order):
    """The same batches, each from its end."""

    def batch_ids(self, step: int) -> Ids:
        return super().batch_ids(step)[::-1].copy()


@dataclass(frozen=True)
class Probing:
    """How to train, and where to write."""

    folder: Path
    how: How = field(default_factory=How)
    lr_scale: float = 1.0
    record: Record | None = None
    backwards: bool = False
    """Each batch from its last sample to its first: other sums, where micro-batches may not be others."""
    saves: bool = False
    """Whether a checkpoint is saved on the way."""


def probe(experiment: Experiment, here: Here, probing: Probing) -> None:
    """Train on this rank; rank 0 writes what all have found."""
    steps_per_epoch = -(-len(experiment.train) // experiment.batch)
    epochs = -(-steps_of(experiment) // steps_per_epoch)
    watched = Watched(experiment.train, experiment.seed, epochs)
    evals = {name: _some_of(data) for name, data in experiment.evals.items()}
    gradients = Gradients(keeps_largest=here.size == 1)
    trainer = Trainer(
        replace(experiment, train=watched, evals=evals),
        here,
        workers=0,  # what is read must be seen here
        lr_scale=probing.lr_scale,
        record=probing.record,
        how=replace(probing.how, torchao=False),  # its scales are other ones than layouts with more axes have
        inspect=gradients,
        keeping=Keeping(probing.folder / CHECKPOINTS, every=Every(never=True)) if probing.saves else None,
    )
    if probing.backwards:
        trainer.order = Backwards.of(watched, experiment.batch, experiment.seed, experiment.shuffle)
    trainer.optimizer.register_step_post_hook(gradients.after_update)
    pieces, unsaved = [], None
    saved = trainer.total_steps - min(REPEATED, trainer.total_steps // 2)
    for update in trainer.steps():
        pieces.append(update.pieces)
        if trainer.keeper is not None and trainer.step == saved:
            unsaved = trainer.keeper.save_now()
    scores = trainer.evaluate() if evals else {}
    if not evals:
        trainer.placed.agree_on_buffers()
    weights = {name: tensor.clone() for name, tensor in trainer.placed.weights()}
    ranks = here.gathered(
        {
            "squares": gradients.squares,
            "factors": gradients.factors,
            "pieces": pieces,
            "samples": {_as_key(*each): digest for each, digest in watched.seen.items()},
            "unstable": watched.unstable,
            "held": _held(trainer.placed),
        }
    )
    if here.rank != 0:
        return
    replicas = {here.layout.rank_of({**here.layout.coordinates(0), **place}): None for place in _replicas(here)}
    found = Found(
        layout=str(here.layout),
        world=here.size,
        replicas=here.replicas,
        losses=trainer.totals.losses,
        grad_norms=trainer.totals.grad_norms,
        gradients=_norms([each["squares"] for each in ranks], trainer.totals.grad_norms, experiment.clip),
        evals=scores,
        length=len(experiment.train),
        ids=_hash_of_ids([ranks[rank]["pieces"] for rank in replicas]),
        samples=_merged([each["samples"] for each in ranks]),
        unstable=sorted({number for each in ranks for number in each["unstable"]}),
        pieces=[len(piece) for piece in pieces[0]],
        factors=[each["factors"] for each in ranks],
        torn=_torn([each["held"] for each in ranks]),
        sync_batchnorm=probing.how.sync_batchnorm,
        saved=saved if probing.saves else None,
        unsaved=unsaved,
    )
    save_weights(weights, probing.folder / WEIGHTS, {})
    if here.size == 1:
        save_weights(gradients.largest, probing.folder / LARGEST, {})
        watched.read_again()
        found = replace(found, tried=_try(trainer, experiment), unstable=sorted(watched.unstable))
    write_json(probing.folder / FOUND, dataclasses.asdict(found))


def _some_of(data: MapDataset) -> MapDataset:
    return Subset(data, range(min(len(data), EVALUATED)))  # type: ignore[arg-type]


class Watched:
    """The user's dataset; remembers a hash of each sample, and those that change.

    A sample that draws from a global generator is another one in each epoch, and is remembered by the seed that it was
    read with. What it draws before the generators are seeded by sample does not count.
    """

    def __init__(self, dataset: MapDataset, seed: int, epochs: int) -> None:
        self.dataset = dataset
        self.seen: dict[tuple[int, int | None], str] = {}
        """(number, seed of what it has drawn or None) -> hash."""
        self.unstable: set[int] = set()
        self._seed, self._epochs = seed, epochs
        for name in ("chunk", "lengths"):  # which decide the order
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))
        many: Callable[[list[int]], list[Any]] | None = getattr(dataset, "__getitems__", None)
        if many is not None:
            self.__getitems__ = functools.partial(self._look_at_many, many)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        before = snapshot()
        sample = sample_of(self.dataset, number)
        word: int | None = None
        if not before.same(snapshot()):
            word = torch.initial_seed()
            if word not in (word_for(self._seed, epoch, number) for epoch in range(self._epochs)):
                return sample
        self._look(number, word, sample)
        return sample

    def read_again(self, most: int = 8) -> None:
        """A sample that is never read twice in a short training may still change."""
        with put_back():
            for number, word in list(self.seen)[:most]:
                if word is not None:
                    seed_with(word)
                self[number]

    def _look_at_many(self, many: Callable[[list[int]], list[Any]], ids: list[int]) -> list[Any]:
        before = snapshot()
        samples = many(ids)
        if before.same(snapshot()):
            for number, sample in zip(ids, samples, strict=True):
                self._look(number, None, sample)
        return samples

    def _look(self, number: int, word: int | None, sample: Any) -> None:
        if (number, word) in self.seen or len(self.seen) < REMEMBERED:
            digest = digest_of(sample)
            if self.seen.setdefault((number, word), digest) != digest:
                self.unstable.add(number)


def _as_key(number: int, word: int | None) -> str:
    return str(number) if word is None else f"{number} drawn with {word}"


def digest_of(sample: Any) -> str:
    """A hash of all numbers and texts in a sample."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(sample):
        if isinstance(leaf, Tensor):
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, np.ndarray | np.generic):
            digest.update(np.ascontiguousarray(leaf).tobytes())
        elif isinstance(leaf, int | float | str | bytes):
            digest.update(repr(leaf).encode())
        # What other objects say of themselves may hold an address.
        digest.update(type(leaf).__name__.encode())
    return digest.hexdigest()


class Gradients:
    """Shown the gradients of every step before and after the optimizer uses them; keeps their norms."""

    def __init__(self, keeps_largest: bool) -> None:
        self.squares: list[dict[str, float]] = []
        """A step's sum of squares of each parameter's gradient: this rank's share of it."""
        self.factors: list[float] = []
        self.largest: dict[str, Tensor] = {}
        self._keeps_largest = keeps_largest
        self._placed: Placed | None = None
        self._norm = 0.0

    def __call__(self, step: int, placed: Placed) -> None:
        del step
        squares: dict[str, float] = {}
        for shard in placed.shards:
            grad = shard.parameter.grad
            if grad is None:
                continue
            square = torch.linalg.vector_norm(as_real(grad), dtype=torch.float64).item() ** 2 / shard.copies
            squares[shard.name] = squares.get(shard.name, 0.0) + square
            if self._keeps_largest:
                size = grad.detach().abs()
                before = self.largest.get(shard.name)
                self.largest[shard.name] = size if before is None else torch.maximum(before, size)
        self.squares.append(squares)
        self.factors.append(1.0)
        self._placed, self._norm = placed, _local_norm(placed)

    def after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """A hook on the optimizer: has its step changed the gradients that it was given?"""
        del optimizer, args, kwargs
        if self._placed is not None and self._norm:
            self.factors[-1] = _local_norm(self._placed) / self._norm


def _local_norm(placed: Placed) -> float:
    gradients = [each.parameter.grad for each in placed.shards if each.parameter.grad is not None]
    return math.hypot(*(torch.linalg.vector_norm(as_real(each), dtype=torch.float64).item() for each in gradients))


def _norms(
    ranks: Sequence[list[dict[str, float]]], grad_norms: list[float], clip: float | None
) -> list[dict[str, float]]:
    """Each parameter's norm at each step, added up over ranks, and scaled back to what it was before clipping."""
    found = []
    for shares, norm in zip(zip(*ranks, strict=True), grad_norms, strict=True):
        names = dict.fromkeys(name for share in shares for name in share)
        clipped_by = 1.0 if clip is None else max(1.0, norm / clip)
        found.append({name: math.sqrt(sum(share.get(name, 0.0) for share in shares)) * clipped_by for name in names})
    return found


def _replicas(here: Here) -> list[dict[str, int]]:
    return [{"dp": dp, "fsdp": fsdp} for dp in range(here.layout.dp) for fsdp in range(here.layout.fsdp)]


def _hash_of_ids(replicas: list[list[list[list[int]]]]) -> str:
    """Of the numbers of all samples, step by step, as the replicas together have trained on them."""
    digest = hashlib.sha256()
    for step in zip(*replicas, strict=True):
        ids = [number for pieces in step for piece in pieces for number in piece]
        digest.update(np.asarray(ids, dtype="<i8").tobytes())
    return digest.hexdigest()


def _merged(ranks: Sequence[dict[str, str]]) -> dict[str, str]:
    """One hash a sample; where ranks have read other things, all of theirs."""
    found: dict[str, set[str]] = {}
    for seen in ranks:
        for number, digest in seen.items():
            found.setdefault(number, set()).add(digest)
    return {number: "|".join(sorted(digests)) for number, digests in found.items()}


def _held(placed: Placed) -> dict[str, tuple[int, float]]:
    """What this rank holds of each parameter, in two numbers: on how many ranks it is, and its norm."""
    found: dict[str, tuple[int, float]] = {}
    for shard in placed.shards:
        name, number = shard.name, 1
        while name in found:
            number += 1
            name = f"{shard.name} ({number})"
        found[name] = (
            shard.copies,
            torch.linalg.vector_norm(as_real(shard.parameter.detach()), dtype=torch.float64).item(),
        )
    return found


def _torn(ranks: Sequence[dict[str, tuple[int, float]]]) -> list[str]:
    """Parameters of which ranks hold more different parts than there are."""
    torn = []
    for name in dict.fromkeys(name for held in ranks for name in held):
        copies = max(held[name][0] for held in ranks if name in held)
        norms = sorted(held[name][1] for held in ranks if name in held)
        apart = sum(exceeds(b - a, 1e-4 * abs(b)) for a, b in itertools.pairwise(norms))
        if 1 + apart > max(1, len(norms) // copies):
            torn.append(name)
    return torn


def _try(trainer: Trainer, experiment: Experiment) -> Tried:
    """Look for the usual mistakes in one batch. What cannot be tried on this program is no evidence against it."""
    model = trainer.model
    tried = Tried(batchnorms=[n for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)])
    ids = trainer.order.batch_ids(0).tolist()[: min(TRIED, experiment.micro or TRIED)]
    with contextlib.suppress(Exception):
        tried = replace(tried, collate_draws=_collate_draws(experiment, ids))
    with contextlib.suppress(Exception):
        tried = replace(tried, augment_draws=_augmented(trainer, experiment, ids)[1])
    with contextlib.suppress(Exception):
        tried = replace(tried, mixes=_mixes(trainer, experiment, ids))
    with contextlib.suppress(Exception):
        tried = replace(tried, changing_eval=_changing_eval(experiment))
    with contextlib.suppress(Exception):
        tried = replace(tried, loss=_loss_is(trainer, experiment, ids))
    with contextlib.suppress(Exception):
        tried = replace(tried, draws=_draws(trainer, experiment, ids))
    return tried


def _collate_draws(experiment: Experiment, ids: list[int]) -> bool:
    with put_back():
        samples = [sample_of(experiment.train, number) for number in ids]
        before = snapshot()
        (experiment.collate or default_collate)(samples)
        return not before.same(snapshot())


def _read(trainer: Trainer, experiment: Experiment, ids: list[int]) -> tuple[Any, Any]:
    samples = Samples(experiment.train, experiment.collate, seed=experiment.seed)
    batch = samples[Wanted(ids, len(ids), epoch=0)].batch
    return as_pair(to_device(batch, trainer.here.device))


def _augmented(trainer: Trainer, experiment: Experiment, ids: list[int]) -> tuple[Any, bool]:
    """A batch's inputs, and whether augmenting them has drawn from a global generator."""
    with put_back():
        inputs, _ = _read(trainer, experiment, ids)
        before = snapshot()
        if experiment.augment is not None:
            inputs = experiment.augment(inputs, SampleDraws(experiment.seed, 0, ids, trainer.here.device))
        return inputs, not before.same(snapshot())


def _mixes(trainer: Trainer, experiment: Experiment, ids: list[int]) -> bool:
    """Whether the inputs of some of the samples by themselves are not those that they have in the batch."""
    some = -(-len(ids) // 2)
    whole, part = (tree_leaves(_augmented(trainer, experiment, each)[0]) for each in (ids, ids[:some]))
    pairs = [(a[:some], b) for a, b in zip(whole, part, strict=True) if isinstance(a, Tensor) and len(a) == len(ids)]
    return any(a.shape == b.shape and not torch.allclose(a, b, equal_nan=True) for a, b in pairs)


def _changing_eval(experiment: Experiment, most: int = 8) -> str | None:
    with put_back():
        for name, data in experiment.evals.items():
            for number in range(min(most, len(data))):
                found = set()
                for _ in range(2):
                    seed_with(word_for(experiment.seed, None, number))
                    found.add(digest_of(sample_of(data, number)))
                if len(found) > 1:
                    return name
    return None


def _draws(trainer: Trainer, experiment: Experiment, ids: list[int]) -> list[str]:
    placed, model = trainer.placed, trainer.model
    assert isinstance(placed, Replicated)
    placed.train(True)
    placed.moment.step, placed.moment.ids = 0, torch.tensor(ids, device=trainer.here.device)
    inputs, _ = _read(trainer, experiment, ids)
    with torch.no_grad(), computing(experiment.precision, trainer.here.device):
        return [str(each) for each in find_draws(model, lambda: call(model, inputs))]


@torch.no_grad()
def _loss_is(trainer: Trainer, experiment: Experiment, ids: list[int]) -> str:
    """sum, mean or other: by calling the loss on samples together and in two parts."""
    if len(ids) < 2:
        return "sum"
    trainer.placed.train(False)

    def score(part: list[int]) -> tuple[float, float]:
        inputs, targets = _read(trainer, experiment, part)
        with computing(experiment.precision, trainer.here.device):
            loss = experiment.loss(call(trainer.model, inputs), targets)
        return float(loss.total), float(loss.count)

    cut = -(-len(ids) // 3)
    (whole, count), (first, first_count), (rest, rest_count) = score(ids), score(ids[:cut]), score(ids[cut:])
    slack = 1e-2 if experiment.precision != "fp32" else 1e-3
    if math.isclose(whole, first + rest, rel_tol=slack) and math.isclose(count, first_count + rest_count):
        return "sum"
    return "mean" if min(first, rest) <= whole * (1 + 1e-6) and whole <= max(first, rest) * (1 + 1e-6) else "other"
