"""A way to the server that can be cut, as when the router before a node loses its connections."""

import socket
import struct
from contextlib import suppress
from threading import Thread

from tests.sharding.flower.programs import LOOPBACK

RESET = struct.pack("ii", 1, 0)  # how a connection is closed that the router has forgotten


class Relay:
    """Forwards connections to a port of this machine.

    Attributes:
        port: of the relay.
    """

    def __init__(self, port):
        self._to, self.port, self._open = port, 0, []
        self.restore()

    def cut(self):
        """Reset all connections, and refuse others."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for node, server in self._open:
            with suppress(OSError):  # closed already
                node.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                node.shutdown(socket.SHUT_RD)
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def restore(self):
        """Accept connections."""
        self._listener = socket.create_server((LOOPBACK, self.port))
        self.port = self._listener.getsockname()[1]
        Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener):
        with suppress(OSError):
            while True:
                node, _ = listener.accept()
                server = socket.create_connection((LOOPBACK, self._to))
                self._open.append((node, server))
                for ends in ((node, server), (server, node)):
                    Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source, target):
        with suppress(OSError), source:
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
