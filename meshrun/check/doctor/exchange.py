"""How ranks tell rank 0 what they have seen, though the network, or the shared folder, may be what is broken.

    exchange = Exchange(world, runs, listener, addresses, patience=30.0)
    answer = exchange.round("facts", mine, decide)      # decide(letters by rank) runs on rank 0; None: no word from it
    exchange.tell("together", figures, patience=60.0)   # the last word, nobody answers
    exchange.heard["together"]                          # on rank 0: all letters, by rank

A letter goes both ways that there are: as a file in RUNS/.doctor/JOB and over TCP to rank 0, and is heard if one of the
two works. Rank 0 says in that folder where it listens; a rank that does not see it there tries the address that the
launcher names, at a port that follows from the job's name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from meshrun import strict_json
from meshrun.check.doctor.listener import Listener, ask
from meshrun.config import made_private, write_json
from meshrun.files import read_own
from meshrun.world import World

Document = dict[str, Any]
FOLDER = ".doctor"
LOOK_EVERY = 0.02
"""Seconds between two looks for a letter; in worlds above 64 ranks as many times longer as they are larger."""
GONE = 25
"""Looks in a row without any sign of rank 0, after it has answered before: it is done, or dead."""
SHOWN_AFTER = 5.0
"""Seconds until a file that was written on one node is seen on all: then the folder is not shared."""


def ports_of(job: str) -> list[int]:
    """Ports that rank 0 of this job tries to listen on, below those that systems give to anybody."""
    seed = int.from_bytes(hashlib.sha256(job.encode(errors="surrogateescape")).digest()[:4])
    return [20_000 + (seed + 2_503 * index) % 12_000 for index in range(4)]


class Exchange:
    """One rank's way to rank 0, and rank 0's to all."""

    def __init__(self, world: World, runs: Path, listener: Listener, addresses: list[str], patience: float) -> None:
        """`addresses`: where this rank may be reached, which rank 0 lets the others know."""
        self._world, self._listener, self._patience = world, listener, patience
        job = f"{world.job}-{world.attempt}"
        name = quote(job, safe="", errors="surrogateescape")
        self._home = runs / FOLDER / (name if len(name) <= 150 else hashlib.sha256(name.encode()).hexdigest())
        self._token = secrets.token_hex(8)
        self._expected = set(range(world.size))
        self._pause = LOOK_EVERY * max(1.0, world.size / 64)
        self._at: tuple[str, int] | None = None
        self._answered = False
        self.heard: dict[str, dict[int, Document]] = {}
        """On rank 0: the letters of each round, by rank."""
        self.files_work = False
        """Whether this rank has seen rank 0's file, or is rank 0 and could write it."""
        if world.rank == 0 and world.size > 1:
            with contextlib.suppress(OSError):
                self._home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                if not all(map(made_private, (self._home.parent, self._home))):
                    raise PermissionError(errno.EPERM, "another user could say what ranks have left there")
                (self._home / self._token).mkdir()
                write_json(self._home / "rank-0.json", {"at": addresses, "port": listener.port, "token": self._token})
                self.files_work = True

    def round(
        self,
        phase: str,
        mine: Document,
        decide: Callable[[dict[int, Document]], Document],
        patience: float | None = None,
    ) -> Document | None:
        """Give rank 0 this rank's letter; what it makes of all of them comes back to everybody."""
        patience = patience or self._patience
        if self._world.rank == 0:
            letters = self._collected(phase, mine, patience)
            answer = decide(letters)
            self._listener.answers[phase] = answer
            self._write(self._token, f"{phase}-answer", {"answer": answer, "heard": self._heard(phase)})
            return answer
        return self._sent(phase, mine, patience, wants_answer=True)

    def tell(self, phase: str, mine: Document, patience: float) -> None:
        """The last letter: others go on once it is delivered, rank 0 when it has all of them."""
        if self._world.rank == 0:
            self._collected(phase, mine, patience)
        else:
            self._sent(phase, mine, patience, wants_answer=False)

    def sees_files(self) -> bool:
        """Whether what rank 0 wrote is seen here; a network file system may take a moment to show it."""
        give_up = time.monotonic() + SHOWN_AFTER
        while not self.files_work and self._world.rank != 0 and time.monotonic() < give_up:
            self.files_work = self._hello() is not None
            time.sleep(self._pause)
        return self.files_work

    def seen_files(self) -> set[int]:
        """On rank 0: whose letters it has seen in the shared folder."""
        names = _listed(self._home / self._token)
        return {rank for rank in range(self._world.size) if any(name.endswith(f"-{rank}.json") for name in names)}

    def close(self) -> None:
        """Leave nothing behind."""
        if self._world.rank == 0 and self.files_work:
            shutil.rmtree(self._home, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._home.parent.rmdir()

    def _collected(self, phase: str, mine: Document, patience: float) -> dict[int, Document]:
        letters = {0: mine}
        give_up = time.monotonic() + patience
        while self._expected - set(letters) and time.monotonic() < give_up:
            letters |= {rank: letter["document"] for rank, letter in self._arrived(phase).items()}
            time.sleep(self._pause)
        # Who did not come to one round is not waited for in the next.
        self._expected &= set(letters)
        self.heard[phase] = dict(sorted(letters.items()))
        return self.heard[phase]

    def _arrived(self, phase: str) -> dict[int, Document]:
        """Letters of a phase by rank, from the network and from the folder."""
        found = {rank: letter for (name, rank), letter in list(self._listener.letters.items()) if name == phase}
        folder = self._home / self._token
        there = set(_listed(folder))
        for rank in self._expected - set(found) - {0}:
            letter = _read(folder / f"{phase}-{rank}.json", there)
            if letter and "token" in letter and self._listener.understands(phase, letter.get("document")):
                found[rank] = letter
        return found

    def _heard(self, phase: str) -> dict[str, str]:
        return {str(rank): letter["token"] for rank, letter in self._arrived(phase).items()}

    def _sent(self, phase: str, mine: Document, patience: float, wants_answer: bool) -> Document | None:
        letter = {"rank": self._world.rank, "phase": phase, "token": self._token, "document": mine}
        give_up, written, silent = time.monotonic() + 2 * patience, "", 0
        while time.monotonic() < give_up and not (self._answered and silent > GONE):
            hello = self._hello()
            if hello is not None and written != hello["token"]:
                self.files_work = True
                written = hello["token"]
                self._write(written, f"{phase}-{self._world.rank}", letter)
            reply = self._posted(letter, hello) or self._left_for_me(phase, hello)
            if reply is not None and reply.get("answer") is not None:
                self._answered = True
                return reply["answer"]
            if not wants_answer and (reply is not None or self._is_left(phase, hello)):
                return None
            silent = silent + 1 if reply is None and hello is None else 0
            time.sleep(self._pause)
        return None

    def _left_for_me(self, phase: str, hello: Document | None) -> Document | None:
        """Rank 0's answer in the folder; one to another letter was left by an earlier launch of the same name."""
        found = _read(self._home / hello["token"] / f"{phase}-answer.json") if hello is not None else None
        mine = found is not None and found.get("heard", {}).get(str(self._world.rank)) == self._token
        return found if mine else None

    def _is_left(self, phase: str, hello: Document | None) -> bool:
        """Whether this rank's letter lies in the folder."""
        return hello is not None and (self._home / hello["token"] / f"{phase}-{self._world.rank}.json").exists()

    def _hello(self) -> Document | None:
        found = _read(self._home / "rank-0.json")
        return found if found is not None and {"at", "port", "token"} <= set(found) else None

    def _posted(self, letter: Document, hello: Document | None) -> Document | None:
        """Rank 0's reply over the network, by the first of all addresses that works."""
        tried = [self._at] if self._at else list(self._addresses(hello))
        for address, port in tried:
            reply = ask(address, port, {"job": self._world.job, "kind": "letter", **letter}, timeout=1.0)
            if reply is not None:
                self._at = (address, port)
                return reply
        self._at = None
        return None

    def _addresses(self, hello: Document | None) -> Iterator[tuple[str, int]]:
        if hello is not None:
            yield from ((address, hello["port"]) for address in hello["at"])
            return
        if self._world.nodes == 1:
            hosts = ["127.0.0.1"]
        else:
            hosts = [host for host in (*self._world.hosts[:1], self._world.address) if host]
        yield from ((host, port) for host in hosts for port in ports_of(self._world.job))

    def _write(self, token: str, name: str, document: Document) -> None:
        with contextlib.suppress(OSError):
            write_json(self._home / token / f"{name}.json", document)


def _read(path: Path, there: Collection[str] | None = None) -> Document | None:
    """A document that is complete by now; `there` is what its folder holds, where that was looked up already."""
    # NFS remembers for up to a minute that a name was absent; listing the folder asks the server again.
    if path.name not in (_listed(path.parent) if there is None else there):
        return None
    with contextlib.suppress(OSError, ValueError):
        return strict_json.of_type(Document, strict_json.loads(read_own(path)), "it")
    return None


def _listed(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)  # noqa: PTH208
    return []
