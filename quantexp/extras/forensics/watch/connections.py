"""Connections of this machine, and the requests that they send.

One event loop reads all requests, so a connection that sends its request slowly, or none, costs no thread. A request is
answered by a thread once it is whole. It must be whole `REQUEST_S` after its connection was opened or its last answer
was sent, and its answer must be taken in as long; however few bytes come meanwhile, the connection ends then.

At `MOST` connections, a new one takes the place of the oldest one that has not sent a whole request, which must be
`GRACE_S` old. Others wait in the system's queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future

HOST = "127.0.0.1"
#: Connections at once; at most half of the process's file descriptors.
MOST = 512
#: Connections that wait in the system's queue, if the system allows as many.
QUEUE = 1024
#: Requests that are answered at once.
MOST_ANSWERING = 32
#: Seconds until a request must be whole, and its answer be taken.
REQUEST_S = 20.0
#: Seconds that each connection has for its first request.
GRACE_S = 1.0
#: Bytes of a request.
MOST_BYTES = 1 << 16
#: Seconds between two looks for room.
_LOOK_S = 0.05
#: Seconds until a signal is seen that came just before the loop began to wait: nothing else would wake it.
_SIGNAL_S = 1.0


class Connections(ABC):
    """A server of requests without content."""

    def __init__(self, port: int) -> None:
        """Listen on `port`, or on any free one for 0.

        Raises:
            OSError: the port is in use, or may not be used.
        """
        self._socket = socket.create_server((HOST, port), backlog=QUEUE)
        self._socket.setblocking(False)
        #: Where it listens.
        self.port = int(self._socket.getsockname()[1])
        self._loop, self._is_over = asyncio.new_event_loop(), asyncio.Event()
        self._answering = asyncio.Semaphore(MOST_ANSWERING)
        self._tasks = set[asyncio.Task[None]]()
        #: Those without a whole request, and when they were opened; the oldest first.
        self._silent = dict[asyncio.Task[None], float]()

    @abstractmethod
    def answer(self, request: bytes) -> tuple[bytes, bool]:
        """The answer to a request, and whether its connection goes on; must not raise.

        A request ends with an empty line, unless it is too long: then it has more than `MOST_BYTES`.
        """

    def serve(self) -> None:
        """Answer until `end`, which another thread may call."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    def end(self) -> None:
        """End `serve`, if it goes on."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._is_over.set)

    def close(self) -> None:
        """Stop listening, after `serve` or without it."""
        self._socket.close()
        self._loop.close()

    async def _serve(self) -> None:
        accepting = asyncio.create_task(self._accept())
        over = asyncio.create_task(self._wait_for_end())
        done = set[asyncio.Task[None]]()
        while not done:
            done, _ = await asyncio.wait(
                {accepting, over}, timeout=_SIGNAL_S, return_when=asyncio.FIRST_COMPLETED
            )
        if accepting.done():
            accepting.result()

    async def _wait_for_end(self) -> None:
        await self._is_over.wait()

    async def _accept(self) -> None:
        most = min(MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        while True:
            while len(self._tasks) >= most:
                await self._make_room()
            try:
                connection, _ = await self._loop.sock_accept(self._socket)
            except OSError:  # the client has gone, or there is no file descriptor left
                await asyncio.sleep(_LOOK_S)
                continue
            task = asyncio.create_task(self._converse(connection))
            self._tasks.add(task)
            self._silent[task] = time.monotonic()
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._silent.pop(task, None)

    async def _make_room(self) -> None:
        oldest, since = next(iter(self._silent.items()), (None, 0.0))
        if oldest is None or time.monotonic() < since + GRACE_S:
            await asyncio.sleep(_LOOK_S)
            return
        oldest.cancel()
        await asyncio.wait({oldest})

    async def _converse(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=MOST_BYTES)
        writer.transport.set_write_buffer_limits(0)  # an answer is taken when `drain` returns
        goes_on = True
        try:
            while goes_on:
                async with asyncio.timeout(REQUEST_S):
                    request = await _request(reader)
                if not request:
                    break
                self._silent.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
                async with self._answering:
                    answer, goes_on = await self._in_thread(request)
                async with asyncio.timeout(REQUEST_S):
                    writer.write(answer)
                    await writer.drain()
            writer.close()
        except OSError:  # too late, or gone
            pass
        finally:
            if not writer.is_closing():
                writer.transport.abort()

    async def _in_thread(self, request: bytes) -> tuple[bytes, bool]:
        """The answer, by a thread that does not keep the program from ending."""
        answer = Future[tuple[bytes, bool]]()
        answer.set_running_or_notify_cancel()
        threading.Thread(
            target=lambda: answer.set_result(self.answer(request)), daemon=True
        ).start()
        return await asyncio.wrap_future(answer)


async def _request(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
    except asyncio.LimitOverrunError as error:
        return await reader.readexactly(error.consumed)
