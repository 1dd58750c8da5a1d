"""Servers that a tracker's library may meet instead of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    connections: list[socket.socket] = []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(50)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connections.append(server.accept()[0])

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in connections:
        connection.close()


def absent() -> str:
    """An address at which nothing listens."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{server.getsockname()[1]}"
