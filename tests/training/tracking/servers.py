"""Servers that a tracker's library may meet when its own is away."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """The address of a server that takes connections and never says a word."""
    held: list[socket.socket] = []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(50)

        def take() -> None:
            with contextlib.suppress(OSError):
                while True:
                    held.append(server.accept()[0])

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in held:
        connection.close()


def absent() -> str:
    """An address at which nothing listens."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{server.getsockname()[1]}"
