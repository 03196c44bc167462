"""Runs functions in forked processes at once, as readers are, and hands back what they return."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any


def forked(count: int, work: Callable[[int], Any]) -> list[Any]:
    """`work(number)` in each of so many processes, which begin together."""
    context = multiprocessing.get_context("fork")
    together = context.Barrier(count)
    results = context.SimpleQueue()

    def body(number: int) -> None:
        together.wait(60)
        try:
            results.put((number, work(number)))
        except Exception as error:
            results.put((number, error))

    processes = [context.Process(target=body, args=(number,), daemon=True) for number in range(count)]
    for each in processes:
        each.start()
    found = dict(results.get() for _ in processes)
    for each in processes:
        each.join(60)
        assert each.exitcode == 0
    return [found[number] for number in range(count)]
