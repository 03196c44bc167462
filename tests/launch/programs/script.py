"""A loop of one's own, which knows nothing of an experiment."""

from __future__ import annotations

import argparse

import meshrun

parser = argparse.ArgumentParser()
parser.add_argument("--values", type=float, nargs="+", default=[1.0])
parser.add_argument("--steps", type=int, default=1)
given = parser.parse_args()

here = meshrun.start()
print(f"rank {here.rank} of {here.size} has started")
mean = meshrun.mean_over_ranks(given.values[here.rank % len(given.values)])
meshrun.print0(f"mean {mean.item():g} over {here.size} after {given.steps} steps")
meshrun.finish()
