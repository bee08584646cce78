"""Ports for servers on loopback, each given once."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress

PORTS = range(10_000, 20_000)  # below those that the system gives to clients, one of which could take it meanwhile
BUS = 10_000  # how far a node's port for the others of its cluster is from that for clients
_held: list[socket.socket] = []


def free_port() -> int:
    """A TCP port that nobody listens to, nor to the one of a cluster's bus that goes with it.

    No other test is given it, in this process or in one beside it, though its server has not started yet or is down
    for a while: the UDP port of the same number, which no server here uses, stays taken until the process ends.
    """
    while True:
        port = secrets.choice(PORTS)  # hypothesis makes ``random`` repeat itself
        mark = socket.socket(type=socket.SOCK_DGRAM)
        with suppress(OSError), socket.socket() as server, socket.socket() as bus:
            mark.bind(("127.0.0.1", port))
            server.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + BUS))
            _held.append(mark)
            return port
        mark.close()
