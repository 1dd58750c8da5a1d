"""Ranks from a warm process: it has imported torch and Megatron once, and forks a rank for each run of a slot.

A slot of a sweep starts `python -m quantexp_launchers.local.warm` beside its first run, in that run's environment: the
variables, the source snapshot, the cores. That run starts cold. Once the warm process has imported what a rank imports,
each further run is a fork of it, and the process that draws it a fork of that; this saves five seconds. A rank is the
same process as a cold one otherwise: it has the same environment, command line, working directory, process group, log
and signals, ends with its parent, and its crash ends nothing else. A run whose environment differs in anything but the
names in `_OF_A_RUN` starts cold, and so do several ranks and runs on a machine with a GPU driver: CUDA does not survive
a fork.

This is what `multiprocessing`'s forkserver does, with what that leaves no room for: its children would import from the
search path of the command, not from the snapshot. The protocol, over a socket: the warm process sends a byte when it is
ready. A request is a line of JSON, with the file descriptors of the log and of those that stay open. The answers are
lines, the process id and the exit code. A rank that has ended is reaped with the next request, so that nobody signals a
process that has got its id.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

import psutil

from quantexp.processes.with_parent import PARENT, end_with_parent, parent_from
from quantexp.runs.device import has_driver
from quantexp.runs.fencing import START
from quantexp.training.drawing import fork_early, keep_threads

WORKER = "quantexp.training.worker"
#: Variables of which each run has its own value.
_OF_A_RUN = frozenset({START, PARENT})
#: Bytes of a request, and of the command line of a rank.
_MOST_BYTES, _ROOM = 1 << 20, 1 << 13
_MOST_FDS = 8
#: What a rank imports before it trains, and what the process imports that draws it.
_IMPORTS = (
    *(WORKER, "quantexp.training.megatron.trainer", "quantexp.training.saver"),
    *("quantexp.analysis.quick.picture", "quantexp.analysis.report.write"),
)
_POLL_S = 0.05


class WarmStart:
    """Starts the runs of one slot, one at a time; `close` it after the last."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._environment: Mapping[str, str] = {}
        self._is_ready = False

    def start(
        self, words: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]
    ) -> WarmRank | None:
        """A rank with this command line, environment and open files, the first its log; None if it must start cold.

        The first call starts the warm process.
        """
        if list(words[1:3]) != ["-m", WORKER] or has_driver() or sys.platform != "linux":
            return None
        if self._process is None:
            self._launch(environment)
            return None
        text = "\0".join(words)
        if not self._ready() or _shared(environment) != _shared(self._environment):
            return None
        own = {name: environment[name] for name in _OF_A_RUN & environment.keys()}
        own[PARENT] = str(self._process.pid)
        request = json.dumps({"words": list(words), "variables": own}).encode() + b"\n"
        if len(os.fsencode(text)) >= _ROOM or len(request) > _MOST_BYTES:
            return None
        assert self._channel is not None
        try:
            socket.send_fds(self._channel, [request], fds)
            return WarmRank(int(_line(self._channel)), self._channel)
        except (OSError, ValueError):  # it has died
            self._is_ready = False
            return None

    def _launch(self, environment: Mapping[str, str]) -> None:
        self._channel, other = socket.socketpair()
        with other:
            self._environment = dict(environment)
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(other.fileno()), "-" * _ROOM],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(other.fileno(),),
                env=self._environment,
            )

    def _ready(self) -> bool:
        assert self._channel is not None
        if not self._is_ready and select.select([self._channel], [], [], 0)[0]:
            with contextlib.suppress(OSError):
                self._is_ready = self._channel.recv(1) != b""
        return self._is_ready

    def close(self) -> None:
        """End the warm process."""
        if self._process is not None:
            assert self._channel is not None
            self._channel.close()
            self._process.kill()
            self._process.wait()


class WarmRank:
    """A forked rank, with those parts of `subprocess.Popen` that watching it takes."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid, self.returncode = pid, -signal.SIGKILL
        self._channel, self._has_ended = channel, False

    def poll(self) -> int | None:
        """The exit code; None while it runs. If its warm process was killed, the code is that of a kill."""
        if not self._has_ended and select.select([self._channel], [], [], 0)[0]:
            line = _line(self._channel)
            if line:
                self.returncode = int(line)
            self._has_ended = bool(line) or not _runs(self.pid)
        return self.returncode if self._has_ended else None

    def wait(self) -> int:
        """Wait for the end."""
        while (code := self.poll()) is None:
            time.sleep(_POLL_S)
        return code

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _runs(pid: int) -> bool:
    """Whether a process runs; in a container nobody may reap one whose parent has ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _shared(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _OF_A_RUN}


def _line(channel: socket.socket) -> bytes:
    """The next line; empty if the other side has ended before it."""
    line = b""
    with contextlib.suppress(ConnectionError):
        while not line.endswith(b"\n"):
            if not (part := channel.recv(1)):
                return b""
            line += part
        return line
    return b""


class _Server:
    """The warm process."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._rank: int | None = None
        #: Ctrl-C and the end of a terminal are for the rank; it gets the handlers that this process was started with.
        self._inherited = {
            number: signal.signal(number, signal.SIG_IGN)
            for number in (signal.SIGINT, signal.SIGHUP)
        }
        self._inherited[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._pass_on)

    def _pass_on(self, signum: int, frame: object) -> None:
        """SIGTERM, which comes when the parent has ended, is for the rank; without one this process ends."""
        if self._rank is None:
            os._exit(0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._rank, signal.SIGTERM)

    def serve(self) -> None:
        """Fork a rank for each request, until the other side closes the socket."""
        self._channel.sendall(b"+")
        while True:
            text, fds, _, _ = socket.recv_fds(self._channel, _MOST_BYTES, _MOST_FDS)
            if self._rank is not None:
                os.waitpid(self._rank, 0)
                self._rank = None
            if not text:
                return
            while not text.endswith(b"\n"):
                text += self._channel.recv(_MOST_BYTES)
            request = json.loads(text)
            before = signal.pthread_sigmask(signal.SIG_BLOCK, self._inherited)
            self._rank = os.fork()
            if self._rank == 0:
                self._become_rank(request["words"], request["variables"], fds, before)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for fd in fds:
                os.close(fd)
            self._channel.sendall(b"%d\n" % self._rank)
            # It stays a zombie until the next request.
            ended = os.waitid(os.P_PID, self._rank, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            self._channel.sendall(b"%d\n" % code)

    def _become_rank(
        self,
        words: Sequence[str],
        variables: Mapping[str, str],
        fds: Sequence[int],
        mask: set[int | signal.Signals],
    ) -> None:
        """Run the worker in this process, which is a fork, and end it."""
        code = 1
        try:
            self._channel.close()
            for stream in (1, 2):
                os.dup2(fds[0], stream)
            os.close(fds[0])
            for name in _OF_A_RUN:
                os.environ.pop(name, None)
            os.environ.update(variables)
            _show_as(words)
            sys.argv = list(words[2:])
            for number, handler in self._inherited.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            keep_threads()
            fork_early(fds[1:], _show_as)
            code = import_module(WORKER).main(sys.argv[1:])
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except KeyboardInterrupt:  # before the worker has its own handler
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:  # noqa: BLE001  (a bug: as Python would end)
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):  # a full disk
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def _show_as(words: Sequence[str]) -> None:
    """Show these words as the command line of this process, by which `quantexp cancel` and people find a rank.

    They replace the arguments with which the warm process was started, `_ROOM` bytes (proc(5): arg_start, arg_end).
    """
    fields = Path("/proc/self/stat").read_bytes().rpartition(b") ")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"\0".join(map(os.fsencode, words))
    if len(text) < end - start:
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def main(fd: int) -> None:
    """Import what a rank imports, then serve. What cannot be imported is for the rank to meet, and to record."""
    server = _Server(socket.socket(fileno=fd))
    end_with_parent(parent_from(os.environ))
    _show_as([*sys.orig_argv[:3], str(fd)])
    from quantexp.training.megatron import without_te

    with contextlib.suppress(Exception), warnings.catch_warnings(record=True) as caught:
        without_te.EARLY = caught
        without_te.import_megatron()
        for name in _IMPORTS:
            import_module(name)
    gc.freeze()
    server.serve()


if __name__ == "__main__":
    main(int(sys.argv[1]))
