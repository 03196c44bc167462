"""At which address other nodes reach this one, and which interface has it.

    address = address_of(world, site)        # "10.11.0.1": the site's rule, the fastest interface, or the host's name
    interface_of(address)                    # "ib0", for gloo and NCCL
    interfaces()                             # all that have an IPv4 address and are up

Left alone, gloo takes what the host's name stands for, which is loopback on many systems, and NCCL the first interface
that it finds, which may be the one for the administrators.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
import sys
from dataclasses import dataclass

from meshrun.errors import RunFailed, UserError
from meshrun.world.detect import World
from meshrun.world.profile import Site

_ELSEWHERE = ("198.51.100.1", 9)
"""An address that nobody has (RFC 5737): asking for the way to it names the default route's interface."""

_SIOCGIFADDR, _SIOCGIFFLAGS, _SIOCGIFHWADDR, _SIOCETHTOOL = 0x8915, 0x8913, 0x8927, 0x8946
"""Linux's numbers for questions on an interface: IPv4 address, state, kind, and those on its cable."""
_RUNNING = 0x40
_INFINIBAND = 32
_UNKNOWN_SPEED = 0xFFFF_FFFF

_NOT_FOR_NODES = re.compile(
    "lo|docker|virbr|veth|vnet|br-|cni|flannel|cali|podman|lxc|lxd|tun|tap|wg|tailscale|zt|usb|idrac"
)
"""How interfaces begin that end in this machine, in a tunnel, or at its own management."""
LOOPBACK_INTERFACE = "lo"
"""Linux's name for the interface that ends in this machine."""
_FAST = re.compile(r"(ib|hsn)[0-9]")


@dataclass(frozen=True)
class Interface:
    """A way out of this machine."""

    name: str
    address: str
    speed: int = 0
    """Megabits a second; 0 when the kernel does not say."""
    infiniband: bool = False

    @property
    def fast(self) -> bool:
        """Whether it is of the kind that supercomputers compute over: InfiniBand, or Slingshot's hsn0."""
        return self.infiniband or _FAST.match(self.name) is not None

    @property
    def between_nodes(self) -> bool:
        return _NOT_FOR_NODES.match(self.name) is None and _reachable(self.address)


def address_of(world: World, site: Site | None = None) -> str:
    """An address of this machine that all ranks of the world can reach."""
    if world.local_size == world.size or world.is_played:
        return "127.0.0.1"
    if site is not None and (suffix := site.get("host_suffix")):
        return _with_suffix(world, site, suffix)
    found = [each for each in interfaces() if each.between_nodes]
    wanted = site.get("socket_interface") if site is not None else None
    for each in found:
        if wanted and each.name.startswith(wanted):
            return each.address
    named, routed = ([each for each in some if _reachable(each)] for some in (resolved(world.host), _routed()))
    usual = next(iter((*named, *routed)), None)
    # A faster way than the usual one is taken only where its speed is known to be above it.
    speed = next((each.speed for each in found if each.address == usual), 0 if usual is None else _UNKNOWN_SPEED)
    best = max(found, key=lambda each: (each.fast, each.speed, each.address == usual), default=None)
    if best is not None and (best.fast or best.speed > speed or usual is None):
        return best.address
    if usual is not None:
        return usual
    raise RunFailed(f"host {world.host!r} has no network address but loopback, and the other ranks are on other nodes")


def interface_of(address: str) -> str | None:
    """The name of the interface that has an address; None for one that is not this machine's own."""
    return next((each.name for each in interfaces() if each.address == address), None)


def for_nccl(interface: str) -> str:
    """What NCCL is to be told: all interfaces of a fast kind, since it can use several, or this one exactly."""
    return interface.rstrip("0123456789") if _FAST.fullmatch(interface) else f"={interface}"


def interfaces() -> list[Interface]:
    """Every interface that is up and has an IPv4 address, in their order; none where the system is not Linux."""
    if sys.platform != "linux":
        return []
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            # The kernel is asked, not /sys: a container may see the /sys of its host.
            try:
                address = socket.inet_ntoa(_asked(probe, _SIOCGIFADDR, name)[20:24])
                flags = struct.unpack("H", _asked(probe, _SIOCGIFFLAGS, name)[16:18])[0]
                kind = struct.unpack("H", _asked(probe, _SIOCGIFHWADDR, name)[16:18])[0]
            except OSError:
                continue
            if flags & _RUNNING:
                found.append(Interface(name, address, _speed(probe, name), kind == _INFINIBAND))
    return found


def resolved(host: str) -> list[str]:
    """What a name stands for, IPv4 first; Debian writes 127.0.1.1 for a host's own."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(entry[4][0]) for entry in sorted(found, key=lambda entry: entry[0] != socket.AF_INET)]


def _with_suffix(world: World, site: Site, suffix: str) -> str:
    name = (world.hosts[world.node] if world.node < len(world.hosts) else world.host).split(".")[0]
    name = name if name.endswith(suffix) else name + suffix
    found = [each for each in resolved(name) if _reachable(each) and ":" not in each]
    if not found:
        raise UserError(
            f"nodes of site {site.name} reach each other by their name with {suffix!r} at its end (host_suffix), but "
            f"{name!r} stands for no address here; correct the profile (meshrun sites show {site.name}) or the --site"
        )
    return found[0]


def _routed() -> list[str]:
    """The address of the default route's interface; a UDP socket is connected, nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
        except OSError:
            return []
        return [str(probe.getsockname()[0])]


def _reachable(address: str) -> bool:
    # An IPv6 address may come with its interface, as fe80::1%eth0.
    found = ipaddress.ip_address(address.partition("%")[0])
    return not (found.is_loopback or found.is_link_local or found.is_unspecified)


def _asked(probe: socket.socket, question: int, name: str) -> bytes:
    import fcntl

    return fcntl.ioctl(probe, question, name.encode()[:15].ljust(256, b"\0"))


def _speed(probe: socket.socket, name: str) -> int:
    """Megabits a second, as `ethtool` shows them."""
    import ctypes
    import fcntl

    # struct ethtool_cmd: the speed's lower half is at byte 12, its upper half at byte 28; command 1 reads them.
    answer = ctypes.create_string_buffer(struct.pack("I", 1).ljust(44, b"\0"), 44)
    request = struct.pack("16sP", name.encode()[:15], ctypes.addressof(answer))
    try:
        fcntl.ioctl(probe, _SIOCETHTOOL, request.ljust(40, b"\0"))
    except OSError:
        return 0
    low, high = struct.unpack_from("H", answer, 12)[0], struct.unpack_from("H", answer, 28)[0]
    speed = low | high << 16
    return 0 if speed in (0xFFFF, _UNKNOWN_SPEED) else speed
