"""Clients that are slow, many, or both; they do no harm, and each is answered that sends its request."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from quantexp.extras.forensics.watch import connections
from quantexp.extras.forensics.watch.connections import HOST, MOST_BYTES, Connections

#: Seconds after which a test fails; nothing takes that long.
LIMIT_S = 60.0
REQUEST = b"GET / HTTP/1.1\r\n\r\n"
LARGE = b"GET /large HTTP/1.1\r\n\r\n"
TOO_LONG = b"too long"


class Echo(Connections):
    """Answers a request with itself; one that asks for much with 64 MiB."""

    def answer(self, request: bytes) -> tuple[bytes, bool]:
        if len(request) > MOST_BYTES:
            return TOO_LONG, False
        return (bytes(1 << 26), True) if request == LARGE else (request, True)


@pytest.fixture
def idle() -> Iterator[Echo]:
    """A server that listens and does not answer yet; its thread is started by `serve`."""
    server = Echo(0)
    yield server
    server.end()
    for thread in threading.enumerate():
        if thread.name == "echo":
            thread.join(LIMIT_S)
    server.close()


@pytest.fixture
def server(idle: Echo) -> Echo:
    serve(idle)
    return idle


def serve(server: Echo) -> None:
    threading.Thread(target=server.serve, name="echo").start()


Connect = Callable[[Echo], socket.socket]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Open a connection, which is closed after the test."""
    opened: list[socket.socket] = []

    def connect(server: Echo) -> socket.socket:
        opened.append(socket.create_connection((HOST, server.port), timeout=LIMIT_S))
        return opened[-1]

    yield connect
    for one in opened:
        one.close()


def received(connection: socket.socket, count: int) -> bytes:
    """As many bytes, or fewer if the connection ends before."""
    content = b""
    while len(content) < count and (piece := connection.recv(count - len(content))):
        content += piece
    return content


def wait_until_ended(connection: socket.socket, word: bytes) -> None:
    """Send a word again and again until the server has ended the connection."""
    deadline = time.monotonic() + LIMIT_S
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while True:
            assert time.monotonic() < deadline, "the connection goes on"
            connection.sendall(word)
            time.sleep(0.01)


def test_two_hundred_clients_at_once_are_all_answered(idle: Echo, connect: Connect) -> None:
    clients = [connect(idle) for _ in range(200)]
    for one in clients:
        one.sendall(REQUEST)
    serve(idle)
    assert {received(one, len(REQUEST)) for one in clients} == {REQUEST}


def test_a_connection_carries_several_requests(server: Echo, connect: Connect) -> None:
    client = connect(server)
    client.sendall(REQUEST + REQUEST[:5])
    assert received(client, len(REQUEST)) == REQUEST
    client.sendall(REQUEST[5:])
    assert received(client, len(REQUEST)) == REQUEST


@pytest.mark.parametrize("sent", [b"", b"G", REQUEST[:-1]])
def test_connections_without_a_whole_request_make_room_for_those_with_one(
    idle: Echo, connect: Connect, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connections, "MOST", 4)
    monkeypatch.setattr(connections, "GRACE_S", 0.01)
    serve(idle)
    for _ in range(40):
        connect(idle).sendall(sent)
    client = connect(idle)
    client.sendall(REQUEST)
    assert received(client, len(REQUEST)) == REQUEST


@pytest.mark.parametrize("word", [b"x", b"X: y\r\n"])
def test_a_request_that_trickles_is_ended_at_its_deadline(
    server: Echo, connect: Connect, monkeypatch: pytest.MonkeyPatch, word: bytes
) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 0.2)
    client = connect(server)
    client.sendall(REQUEST[:-2])
    wait_until_ended(client, word)


def test_a_second_request_has_a_deadline_of_its_own(
    server: Echo, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 0.2)
    client = connect(server)
    client.sendall(REQUEST)
    assert received(client, len(REQUEST)) == REQUEST
    wait_until_ended(client, b"x")


def test_a_client_that_does_not_take_its_answer_is_ended(
    server: Echo, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 0.2)
    client = connect(server)
    client.sendall(LARGE)
    wait_until_ended(client, b"x")


def test_a_request_without_an_end_is_refused_before_it_fills_the_memory(
    server: Echo, connect: Connect
) -> None:
    client = connect(server)
    client.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * MOST_BYTES)
    assert received(client, len(TOO_LONG)) == TOO_LONG
