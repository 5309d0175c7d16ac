"""Ports that are still free when they are used (import tier 0)."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST, _ATTEMPTS = 15_000, 200
_RANGE_FILE = Path('/proc/sys/net/ipv4/ip_local_port_range')


def free_port() -> int:
    """A port that nobody listens on now, and that the system gives to no outgoing connection meanwhile.

    A port that the system proposes itself (bind to 0) comes from the range of outgoing connections: until a server has loaded its model and listens
    there, a connection of another process may have it. Where that range leaves no room below it, such a port is what there is.
    """
    ports = range(_FIRST, _first_of_outgoing())
    for port in random.SystemRandom().sample(ports, min(_ATTEMPTS, len(ports))):
        with socket.socket() as probe:
            try:
                probe.bind(('', port))
            except OSError:
                continue
            return port
    with socket.socket() as probe:
        probe.bind(('', 0))
        return int(probe.getsockname()[1])


def _first_of_outgoing() -> int:
    try:
        return int(_RANGE_FILE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768
