"""Where am I: which rank of how many, on which node, started by whom.

    world = detect(os.environ)
    print(f"rank {world.rank} of {world.size}, started by {world.source}")

`detect` reads what launchers tell a process, `hostlist` their node lists, `cores` which CPU cores a rank takes,
`network` at which address and over which interface nodes talk, `sites` what is known about a cluster (`profile`,
`profile_file`), and `rendezvous` lets ranks find rank 0 where the launcher does not say where it is.
"""

from meshrun.world.detect import World, detect
from meshrun.world.hostlist import expand_hosts

__all__ = ["World", "detect", "expand_hosts"]
