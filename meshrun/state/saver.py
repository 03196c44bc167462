"""Saves a run's state beside the training: a step waits for a copy to host memory, and for nothing else.

    saver = Saver(run.checkpoints, here, run.memory_of(node), keep=2)     # on every rank
    saver.snapshot(regions, step, {"cursor": 7680})                       # the stall, in seconds
    saver.begin()                                                         # a thread writes it to disk
    for saved in saver.finished():
        print(saved.step, saved.seconds, saved.error)

Every rank writes one file into a hidden folder and tells rank 0 through the store, never through a collective, as those
belong to the training. Once all have, rank 0 writes the manifest, and one rename makes the checkpoint visible. So what
has a name is complete. A disk that is full, or gone, is an error in what `finished` returns, and the run goes on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from meshrun.mesh import Here
from meshrun.state import catalog
from meshrun.state.checkpoint import MANIFEST
from meshrun.state.manifest import Entry, File, Index, Manifest, Unfit, laid_out
from meshrun.state.memory import Staging, forget, write_image
from meshrun.state.region import Region, take
from meshrun.state.shards import write_buffers

SHORTEST, LONGEST = 0.002, 0.1
"""Seconds between two looks into the store."""
ABOUT = {"format": "pt", "made_by": "meshrun"}


@dataclass(frozen=True)
class Saved:
    """What became of a save; all ranks hear the same, but for the time that each of them took."""

    step: int
    seconds: float
    bytes: int
    """Of this rank's file."""
    error: str | None
    path: Path | None
    """The checkpoint; known to rank 0."""


class Saver:
    """One rank's part in saving. All ranks make one at the same time, and save the same steps."""

    def __init__(
        self, folder: Path, here: Here, memory: Path | None, keep: int, timeout: float = 600.0, images: int = 1
    ) -> None:
        """With two images, the snapshot before the last one stays: others may still be on the way to theirs."""
        self.folder, self.here, self.memory, self.keep, self.timeout = folder, here, memory, keep, timeout
        if here.rank == 0:
            # Before others know the token: with it they may begin to write at once.
            catalog.remove_partial(folder)
        self.token = str(here.from_rank_0(secrets.token_hex(4)))
        names = [f"{stem}-{here.rank:05d}.safetensors" for stem in ("rank", "other")[:images]]
        self._stagings = deque(Staging(memory / name if memory else None, here.device.type == "cuda") for name in names)
        self.notes: list[str] = []
        """What the user should know of how it saves."""
        self._index: Index | None = None
        self._thread: threading.Thread | None = None
        self._saved: list[Saved] = []
        self._begun: Counter[int] = Counter()

    @property
    def _staging(self) -> Staging:
        """Where the last snapshot is."""
        return self._stagings[0]

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def index(self) -> Index | None:
        """What the last snapshot holds."""
        return self._index

    def prepare(self, regions: Sequence[Region]) -> None:
        """Have the memory for a snapshot ready, so that the first one is as short as all others."""
        self._refuse_while_busy()
        for staging in self._stagings:
            staging.room(laid_out(take(regions), ABOUT)[0].bytes)

    def snapshot(self, regions: Sequence[Region], step: int, state: dict[str, Any]) -> float:
        """Copy what this rank is to write into host memory; returns how long that took."""
        self._refuse_while_busy()
        began = time.perf_counter()
        mine = take(regions)
        laid, entries = laid_out(mine, ABOUT)
        self._stagings.rotate()
        room = self._staging.room(laid.bytes)
        self.notes += self._staging.notes
        self._staging.notes.clear()
        self._index = None
        room[: len(laid.header)] = torch.frombuffer(bytearray(laid.header), dtype=torch.uint8)
        for region, entry in zip(mine, entries, strict=True):
            tensor = region.tensor.detach()
            end = entry.offset + tensor.numel() * tensor.element_size()
            room[entry.offset : end].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        if self.here.device.type == "cuda":
            torch.cuda.synchronize(self.here.device)
        stem = self._staging.path.stem if self._staging.path is not None else f"rank-{self.here.rank:05d}"
        self._index = self._described(stem, step, state, laid.bytes, entries)
        self._mark(self._index)
        return time.perf_counter() - began

    def begin(self) -> None:
        """Start to write the last snapshot to disk."""
        self._refuse_while_busy()
        if self._index is None:
            raise RuntimeError("there is no snapshot to write")
        self._begun[self._index.step] += 1
        self._thread = threading.Thread(target=self._save, args=(self._index,), name="checkpoint", daemon=True)
        self._thread.start()

    def finished(self) -> list[Saved]:
        """The saves that have ended since this was last asked."""
        saved, self._saved = self._saved, []
        return saved

    def wait(self) -> None:
        """Until the save that is under way has ended."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Wait, and give the memory back; the spare copy stays in its file."""
        self.wait()
        self._index = None
        for staging in self._stagings:
            staging.release()

    def put(self, stem: str, regions: Sequence[Region], step: int, state: dict[str, Any]) -> bool:
        """Leave all of these regions in the node's memory for the processes that come next; False if it cannot be.

        Beside the snapshot, under a name of their own: "words" are a rank's last, which its next snapshot removes.
        """
        if self.memory is None:
            return False
        name = f"{stem}-{self.here.rank:05d}"
        held = [region for region in regions if region.tensor.numel()]
        laid, entries = laid_out(held, ABOUT)
        path = self.memory / f"{name}.safetensors"
        try:
            write_image(path, laid.header, held, self._described(name, step, state, laid.bytes, entries))
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            self.notes.append(f"the state of step {step} could not be left in {self.memory}: {error.strerror}")
            return False
        return True

    def _refuse_while_busy(self) -> None:
        if self.busy:
            raise RuntimeError("a save is still under way")

    def _described(self, stem: str, step: int, state: dict[str, Any], size: int, entries: list[Entry]) -> Index:
        here = self.here
        return Index(
            here.rank,
            step,
            str(here.layout),
            here.size,
            state,
            f"{stem}.safetensors",
            File(size, None),
            entries,
        )

    def _mark(self, index: Index) -> None:
        """The snapshot is whole: it replaces what earlier processes left of this rank and of ranks that are no more."""
        try:
            self._staging.mark(index)
        except OSError as error:
            self.notes.append(f"the spare copy of step {index.step} is not marked as whole: {error.strerror}")
        if self.memory is None:
            return
        world = self.here.world
        first = world.rank - world.local_rank
        for path in self.memory.glob("*-*.safetensors"):
            text = path.stem.rpartition("-")[2]
            rank = int(text) if text.isascii() and text.isdigit() else -1
            if path.name.startswith("spare-") and rank < world.size:
                continue  # a neighbour's, which replaces it when it has a newer one
            stale = path.name.startswith("words-") and rank == world.rank
            if stale or (world.local_rank == 0 and not first <= rank < first + world.local_size):
                with contextlib.suppress(OSError):
                    forget(path)
                    path.unlink(missing_ok=True)

    def _save(self, index: Index) -> None:
        """In a thread: write this rank's file, and see to it that it becomes a part of a checkpoint."""
        began = time.perf_counter()
        partial = self.folder / f"{catalog.PARTIAL}{self.token}-step-{index.step:08d}"
        path = None
        try:
            word = self._written(index, partial)
            if self.here.rank == 0:
                path, error = self._committed(index, partial, word)
            else:
                error = self._outcome(index, word)
        except Exception as failure:
            # Nobody sees what a thread raises. The store's errors end here too, when the rank that serves it is gone.
            error = f"rank {self.here.rank} could not save step {index.step}: {(str(failure).splitlines() or [''])[0]}"
            with contextlib.suppress(Exception):
                self._say(index, "outcome" if self.here.rank == 0 else self.here.rank, error)
        self._saved.append(Saved(index.step, time.perf_counter() - began, index.file.bytes, error, path))

    def _written(self, index: Index, partial: Path) -> Index | str:
        """This rank's file on disk; if not, why."""
        index = replace(index, name=f"rank-{index.rank:05d}.safetensors")
        path = partial / index.name
        try:
            partial.mkdir(parents=True, exist_ok=True)
            room = self._staging.filled(index.file.bytes)
            blocks = write_buffers(path, [room.numpy().data])
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return f"rank {self.here.rank} on {self.here.world.host} cannot write {path}: {error.strerror}"
        return replace(index, file=File(index.file.bytes, blocks))

    def _key(self, index: Index, what: object) -> str:
        return f"checkpoint/{self.token}/{index.step}/{self._begun[index.step]}/{what}"

    def _say(self, index: Index, what: object, text: str) -> None:
        if self.here.store is not None:
            self.here.store.set(self._key(index, what), text)

    def _outcome(self, index: Index, word: Index | str) -> str | None:
        """Tell rank 0, and hear what became of it all."""
        store = self.here.store
        assert store is not None
        mine = replace(word, state={}).encode().decode() if isinstance(word, Index) else word
        self._say(index, self.here.rank, mine)
        key = self._key(index, "outcome")
        if not self._appears(key, time.monotonic() + self.timeout + 30):
            return f"rank 0 did not say within {self.timeout:.0f} s what became of step {index.step}"
        return store.get(key).decode() or None

    def _committed(self, index: Index, partial: Path, own: Index | str) -> tuple[Path | None, str | None]:
        """Rank 0: hear from all ranks, and make the checkpoint visible; or remove what there is of it."""
        words = [own, *self._heard(index)]
        errors = [word for word in words if isinstance(word, str)]
        path, error = None, errors[0] if errors else None
        if not errors:
            try:
                path = self._commit(partial, Manifest.of([word for word in words if isinstance(word, Index)]))
            except OSError as failure:
                error = f"cannot complete {partial}: {failure.strerror}"
            except Unfit as unfit:
                error = f"the parts of step {index.step} do not fit together: {unfit}"
        # Before others hear of the outcome and may begin the next save. Earlier saves may have left something too:
        # a disk that gets read-only lets nobody delete what it has taken before.
        catalog.remove_partial(self.folder)
        self._say(index, "outcome", error or "")
        if path is not None:
            self._prune(index)
        return path, error

    def _heard(self, index: Index) -> list[Index | str]:
        words: list[Index | str] = []
        give_up = time.monotonic() + self.timeout
        for rank in range(1, self.here.size):
            store, key = self.here.store, self._key(index, rank)
            assert store is not None
            if not self._appears(key, give_up):
                words.append(f"rank {rank} did not finish writing step {index.step} within {self.timeout:.0f} s")
                continue
            raw = store.get(key)
            store.delete_key(key)
            words.append(Index.decode(raw) if raw.startswith(b"{") else raw.decode())
        return words

    def _appears(self, key: str, give_up: float) -> bool:
        """Look for a key now and then: to wait for one would keep the store from everybody else in this process."""
        pause = SHORTEST
        assert self.here.store is not None
        while not self.here.store.check([key]):
            if time.monotonic() > give_up:
                return False
            time.sleep(pause)
            pause = min(2 * pause, LONGEST)
        return True

    def _commit(self, partial: Path, manifest: Manifest) -> Path:
        manifest.check_extent()
        for name, wanted in manifest.files.items():
            if (partial / name).stat().st_size != wanted.bytes:
                raise OSError(errno.EIO, f"{name} is not as it was written")
        with (partial / MANIFEST).open("wb") as file:
            file.write(manifest.encode())
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(partial)
        path = partial.rename(catalog.free_name(self.folder, manifest.step))
        _sync_folder(self.folder)
        return path

    def _prune(self, index: Index) -> None:
        best = index.state.get("best")
        step = best.get("step") if isinstance(best, dict) else None
        try:
            catalog.prune(self.folder, self.keep, step if isinstance(step, int) else None)
        except OSError as error:
            self.notes.append(f"old checkpoints in {self.folder} cannot be deleted: {error.strerror}")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
