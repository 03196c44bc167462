"""Keeps a training's state: when to save, where to go on from, and what to leave behind when other ranks are lost.

    keeper = Keeper(trainer, Keeping(run.checkpoints, memory, parse("auto")))
    keeper.resume()                 # from the nodes' memory, else from the newest checkpoint that is whole
    keeper.after_step()             # saves when it is time, beside the training
    keeper.leave(graceful=False)    # others are gone: this rank's state goes into its node's memory
    keeper.save_last()              # all ranks stop here, in time: a checkpoint of this very step
    keeper.finish()

All ranks decide the same at the same steps: what differs between them (clocks, a slow disk) is compared at steps that
all know beforehand, and few of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from meshrun.data.drawn import Drawn
from meshrun.errors import RunFailed
from meshrun.launch.words import word_of_the_launcher, writing
from meshrun.state.neighbour import Neighbour
from meshrun.state.saver import Saver
from meshrun.train.interval import failures_apart
from meshrun.train.recovery import Keeping, Recovery
from meshrun.train.state import Moment, moment, passing, regions, values, weights

if TYPE_CHECKING:
    from meshrun.train.loop import Trainer

SPARE_SHARE = 0.02
"""Copies in memory are made as often as they take at most this share of the time: every step, where they are quick."""
LAST_SAVE = 20.0
"""Seconds that a run which is told to stop takes for its last checkpoint."""
AGAIN_AFTER = 30.0
"""Seconds after which a checkpoint that could not be written is tried again, where the interval is a time."""
HEARD_WITHIN = 1.0
"""Seconds that a rank which has lost others waits for the launcher to say which ones."""


class Keeper:
    """The state of one trainer."""

    def __init__(self, trainer: Trainer, keeping: Keeping) -> None:
        self.trainer, self.keeping, self.recovery = trainer, keeping, Recovery(trainer, keeping)
        here = trainer.here
        nodes: list[int] = here.gathered(here.world.node)
        several = len(set(nodes)) > 1
        alone = any(
            len(each.holders) == 1 or (several and len({nodes[rank] for rank in each.holders}) == 1)
            for each in weights(trainer)
        )
        self._hears = here.mesh is None or dist.get_backend() == "gloo"
        """Whether a rank hears of it when others are gone. NCCL's kernels wait for them, and a GPU for its kernels."""
        alone = alone or not self._hears
        self._copies = here.size > 1 and keeping.memory is not None and any(here.gathered(alone))
        """Whether a rank, or a node, holds what no other one could leave: then memory gets copies of it."""
        self._neighbour = Neighbour(here, keeping.memory) if several and self._copies and keeping.memory else None
        self.saver = Saver(
            keeping.folder, here, keeping.memory, keeping.keep, keeping.timeout, images=2 if self._neighbour else 1
        )
        self._first, self._drew = Drawn.now(here.device), False
        """Where generators stood, and whether the program had drawn from them before."""
        self._moment = moment(trainer)
        self._torn = self._prepared = False
        self._cost: float | None = None
        self._stall = 0.0
        self.took: float | None = None
        """Seconds from the beginning of the last checkpoint to its end, as this rank saw it."""
        self.unsaved: str | None = None
        """Why the last checkpoint that was due could not be kept; None if it was."""
        self._saved: int | None = None
        self._given = 0
        """The step with which this training began, if it need not be kept any more."""
        self._saved_at = time.monotonic()
        self._look, self._looked = 0, (0, self._saved_at)
        self._spare_at, self._copied, self._copy_cost = 0, (0, self._saved_at), 0.0

    def resume(self) -> dict[str, Any] | None:
        """Go on from the newest state that is whole; returns where that was, or None for a run that begins."""
        began = time.monotonic()
        source = self.recovery.find()
        if source is not None:
            self._first, self._drew = Drawn.now(self.trainer.here.device), self.trainer.drew
        now = self.trainer.step
        self._saved = now if source == "a checkpoint" else None
        self._given = now if source != "memory" else 0
        self._look = self._spare_at = now + 3
        self._looked = self._copied = (now, time.monotonic())
        self.remember()
        if source is None:
            return None
        self.trainer.totals.ids.begin_at(self.trainer.order, now)
        return {"step": now, "source": source, "seconds": round(time.monotonic() - began, 3)}

    def remember(self) -> None:
        """Note what the next step will change beside the weights, so that a step cut off leaves no trace."""
        self._moment = now = moment(self.trainer)
        self._torn = False
        if self.keeping.memory is None or self.trainer.here.size == 1 or not self._hears:
            return
        if now.buffers or self._has_drawn(now):
            # Lost with this rank otherwise, and no other has them. Of two steps: ranks may be one apart.
            self.saver.put(f"passing-{now.step % 2}", passing(self.trainer, now), now.step, self._values())

    @contextmanager
    def updating(self) -> Iterator[None]:
        """While weights are changed they are of no step, and until `remember` has noted of which one they are then."""
        self._torn = True
        yield

    def after_step(self) -> None:
        """Save if it is time; the step's evaluation, if it had one, is done."""
        self._report()
        step = self.trainer.step
        if not self._prepared:
            self._prepared = True
            # Ranks that were started anew still need what is in that memory.
            if self.keeping.generation == 0 and not self.keeping.every.never:
                self.saver.prepare(regions(self.trainer, self._moment))
        if self._due(step):
            self._save()
        elif self._copies and step >= self._spare_at:
            self._copy_to_memory()

    def _due(self, step: int) -> bool:
        every = self.keeping.every
        if every.never or step == self._saved:
            return False
        if step >= self.trainer.total_steps:
            return True
        if every.steps is not None:
            return step % every.steps == 0
        return step >= self._look and self._time_has_come(step)

    def _time_has_come(self, step: int) -> bool:
        here, now = self.trainer.here, time.monotonic()
        before, then = self._looked
        pace = (now - then) / max(1, step - before)
        # All that differs between ranks is compared: one that decided by its own clock would go its own way.
        own = now - self._saved_at, pace, self._cost, self._busy, self.trainer.totals.seconds, self.unsaved is not None
        words = here.gathered(own)
        elapsed, pace = max(each[0] for each in words), max(max(each[1] for each in words), 1e-4)
        costs = [each[2] for each in words if each[2] is not None]
        trained = max(each[4] for each in words)
        apart = failures_apart(self.keeping.mtbf, here.size, self.keeping.generation, trained)
        wait = self.keeping.every.seconds(max(costs) if costs else None, apart)
        left = (min(wait, AGAIN_AFTER) if any(each[5] for each in words) else wait) - elapsed
        self._looked = step, now
        if left < pace / 2 and not any(each[3] for each in words):
            return True
        # Half of the way, so that a pace that changes is seen in time; a write that is not done yet, in a second.
        self._look = step + max(1, int(max(left / 2, 1.0 if left < pace else 0.0) / pace))
        return False

    def _save(self) -> None:
        trainer, began = self.trainer, time.monotonic()
        trainer.settle()
        trainer.at("saving")
        self.saver.wait()  # at most one in flight
        if self._neighbour is not None:
            self._neighbour.wait()
        self._report()
        trainer.write_late_weights()  # before a state says that they are there
        self._moment = moment(trainer)
        self._stall = self._snapshot()
        self.saver.begin()
        self._saved, self._saved_at = trainer.step, time.monotonic()
        self._cost = self._saved_at - began
        self._look = self._spare_at = trainer.step + 1

    def _copy_to_memory(self) -> None:
        """A copy for the loss of a rank or a node, on all ranks or on none: half of the state is of no use."""
        trainer, began = self.trainer, time.monotonic()
        step, then = self._copied
        own = self._busy, self._copy_cost, (began - then) / max(1, trainer.step - step)
        busy, cost, pace = (max(each) for each in zip(*trainer.here.gathered(own), strict=True))
        if not busy:
            trainer.at("saving")
            trainer.settle()
            self._moment = moment(trainer)
            self._snapshot()
            if self._neighbour is not None and self.saver.index is not None:
                self._neighbour.send(self.saver.index)
            self._copy_cost = time.monotonic() - began
        self._copied = trainer.step, time.monotonic()
        self._spare_at = trainer.step + max(1, math.ceil(cost / (SPARE_SHARE * max(pace, 1e-4))))

    def _snapshot(self) -> float:
        """Copy the state of the moment that was remembered last; returns how long that took."""
        return self.saver.snapshot(regions(self.trainer, self._moment), self._moment.step, self._values())

    @property
    def _busy(self) -> bool:
        """Whether the last snapshot is still being read."""
        return self.saver.busy or (self._neighbour is not None and self._neighbour.busy)

    def _values(self) -> dict[str, Any]:
        return {**values(self.trainer, self._moment), "draws": self._has_drawn(self._moment)}

    def _has_drawn(self, now: Moment) -> bool:
        return self._drew or not now.random.same(self._first)

    def _report(self) -> str | None:
        """Tell what became of saves; returns why the last one failed, if it did."""
        failure = None
        for saved in self.saver.finished():
            failure = self.unsaved = saved.error
            self.took = self._stall + saved.seconds
            self.trainer.tell(
                "checkpoint",
                step=saved.step,
                seconds=round(saved.seconds, 4),
                stall=round(self._stall, 4),
                bytes=saved.bytes,
                error=saved.error,
            )
        for each in (self.saver.notes, self._neighbour.notes if self._neighbour is not None else []):
            while each:
                self.trainer.tell("note", text=each.pop(0))
        return failure

    def go_back(self, before: int) -> int:
        """Load the newest checkpoint of a step up to `before` into the running training; returns its step."""
        self.trainer.at("saving")
        self.saver.wait()
        with self.updating():
            return self.recovery.go_back(before)

    def leave(self, graceful: bool) -> None:
        """This training ends here, since others are lost or someone wants it to: leave its state to who goes on.

        `graceful` says that nobody is gone yet.
        """
        if self._torn or not (graceful or self._hears):
            return
        self.trainer.settle()
        memory, here = self.keeping.memory, self.trainer.here
        if memory is None:
            if here.size == 1:
                self._save_and_wait()
            return
        with writing(memory, here.rank):
            # Who is asked to stop by the launcher has its word already; one who loses others is quicker than it.
            word = word_of_the_launcher(memory, self.keeping.generation, 0.1 if graceful else HEARD_WITHIN)
            if word is not None and word.final:
                self._save_and_wait()
            else:
                self._last_words(word.dead if word is not None else frozenset())

    def save_now(self) -> str | None:
        """Save this very step, on all ranks alike, and wait for it; returns why it could not be kept, if so."""
        self._save()
        self.saver.wait()
        return self._report()

    def save_last(self) -> bool:
        """Keep this very step, on all ranks alike and whatever it takes; False where no state is kept at all."""
        if self.keeping.every.never:
            return False
        if self.trainer.step == self._given:
            return True
        if (failure := self.save_now()) is not None:
            raise RunFailed(f"stopped after step {self.trainer.step:,}, but its checkpoint was not kept: {failure}")
        return True

    def _save_and_wait(self) -> None:
        """Nobody comes after this rank: its state goes to disk."""
        if self.keeping.every.never or self._moment.step in (0, self._saved):
            return
        self.saver.wait()
        self.saver.timeout = LAST_SAVE
        self._snapshot()
        self.saver.begin()
        self.saver.wait()
        self._report()

    def _last_words(self, dead: Set[int]) -> None:
        """Into this node's memory, of what several ranks here hold once."""
        here = self.trainer.here
        first = here.rank - here.world.local_rank
        local = range(first, first + here.world.local_size)

        def writer(holders: tuple[int, ...]) -> int:
            return min((rank for rank in holders if rank in local and rank not in dead), default=here.rank)

        mine = {f"model/{each.name}" for each in weights(self.trainer) if writer(each.holders) == here.rank}
        found = [
            each
            for each in regions(self.trainer, self._moment, writer)
            if not each.name.startswith(("model/", "optimizer/")) or _weight_of(each.name) in mine
        ]
        self.saver.put("words", found, self._moment.step, self._values())

    def finish(self) -> None:
        """Wait for what is still being written."""
        self.saver.wait()
        self._report()
        self.saver.close()


def _weight_of(name: str) -> str:
    """model/W for what belongs to the weight W."""
    kind, _, rest = name.partition("/")
    return f"model/{rest.rpartition('/')[0] if kind == 'optimizer' else rest}"
