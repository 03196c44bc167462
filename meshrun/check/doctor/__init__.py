"""Is this machine, or this allocation, fit for training: facts of every rank, measured and judged.

    seen = examine(world, runs, quick=False)          # on every rank; the result on rank 0
    seen.findings[0].what, .where, .why, .fix

`facts` is what one rank sees (`reading` reads it), `exchange` brings them together even where ranks cannot form a
process group, `links` and `measure` time the network and the devices, and `rules` are pure functions from all of this
to findings.
"""
