"""Under which addresses a peer may reach this process, and which of them really leads there."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # linux/sockios.h


@dataclass(frozen=True)
class Address:
    """Where a rank's status can be asked; `hosts` are tried in order."""

    hosts: tuple[str, ...]
    port: int
    token: str

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"hosts": list(self.hosts), "port": self.port, "token": self.token}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Address:
        """The reverse of `as_dict`."""
        return cls(tuple(plain["hosts"]), int(plain["port"]), str(plain["token"]))


def own_hosts(store_host: str | None) -> tuple[str, ...]:
    """Names of this machine, in the order in which peers should try them.

    The loopback serves those on this machine, even when the network is gone. Then the address that routes to the store;
    on the store's own host that may be a loopback address too, so those of all interfaces follow, and last the host's
    name, which may take long to look up. A token tells whoever asks that it has reached the right process, so a wrong
    guess costs a peer one refused connection.
    """
    found = [LOOPBACK, *_route_to(store_host), *_interface_addresses(), socket.gethostname()]
    return tuple(dict.fromkeys(found))


def _route_to(host: str | None) -> Iterator[str]:
    with suppress(OSError):
        for family, kind, _, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM) if host else ():
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(target)  # sends nothing: it only picks the route
                yield probe.getsockname()[0]


def _interface_addresses() -> Iterator[str]:
    """IPv4 addresses of the interfaces that are not loopback; none where the system is not Linux."""
    if sys.platform != "linux":
        return
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                address = socket.inet_ntoa(answer[20:24])
                if not address.startswith("127."):
                    yield address
