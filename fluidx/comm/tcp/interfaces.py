"""Network interfaces of this host and addresses of sockets."""

from __future__ import annotations

import ipaddress
import socket
import struct
from typing import Any

from ... import config
from ...config import ConfigError

_NAME, _ADDRESS_OF = 16, 0x8915  # bytes of an interface's name; SIOCGIFADDR


def parse(address: str) -> tuple[str, int]:
    """The host and the port of an address.

    >>> parse("node0:29500"), parse("[fd00::1]:29500")
    (('node0', 29500), ('fd00::1', 29500))
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def addresses() -> dict[str, str]:
    """The interfaces of this host that have an IPv4 address, and that address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            if (address := _address_of(asked, name)) is not None:
                found[name] = address
    return found


def chosen() -> str | None:
    """The address of the interface that FLUIDX_INTERFACE names, by its name or its address; None if it is unset.

    Raises ConfigError if this host has no such interface.
    """
    wanted = config.interface()
    if not wanted:
        return None
    there = addresses()
    if wanted in there:
        return there[wanted]
    if _is_address(wanted) and can_bind(wanted):
        return wanted
    known = ", ".join(f"{name} ({address})" for name, address in there.items()) or "none with an address"
    raise ConfigError(
        f"environment variable FLUIDX_INTERFACE: host {socket.gethostname()} has no interface {wanted!r}; its interfaces are {known}"
    )


def resolve(host: str, port: int) -> list[tuple[Any, tuple[Any, ...]]]:
    """The families and addresses of sockets of a host. Raises OSError if the name is not known."""
    return [(family, address) for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def is_loopback(address: str) -> bool:
    """Does an address reach this host only?

    >>> is_loopback("127.0.1.1"), is_loopback("10.0.0.1")
    (True, False)
    """
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _address_of(asked: socket.socket, name: str) -> str | None:
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        found = fcntl.ioctl(asked.fileno(), _ADDRESS_OF, struct.pack(f"{_NAME}s24x", name.encode()[: _NAME - 1]))
    except OSError:  # it has no address
        return None
    return socket.inet_ntoa(found[20:24])


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def can_bind(address: str) -> bool:
    """Does an address, or that of a name, belong to this host? Raises OSError if the name is not known."""
    family, where = resolve(address, 0)[0]
    with socket.socket(family) as tried:
        try:
            tried.bind(where)
        except OSError:
            return False
    return True
