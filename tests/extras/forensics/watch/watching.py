"""`quantexp watch` in a process of its own, which ends with its block, and with the tests if they are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from quantexp.processes import with_parent

#: Seconds in which a machine answers, however busy it is.
LIMIT_S = 120.0


class Watching:
    """The command with its address and other lines; use it in a `with` block."""

    def __init__(self, *words: str) -> None:
        starter = [sys.executable, str(with_parent.__file__), str(os.getpid())]
        command = [*starter, sys.executable, "-m", "quantexp", "watch", *words]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Watching:
        try:
            assert self.process.stdout is not None
            self.lines = [self.process.stdout.readline().rstrip("\n") for _ in range(3)]
            assert all(self.lines), self.process.communicate(timeout=LIMIT_S)
        except BaseException:
            self.__exit__()
            raise
        self.address = self.lines[0].split(" ")[-1]
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()

    def content_when(self, is_ready: Callable[[Any], object]) -> Any:
        """The page's content, as soon as it is there and ready."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            address = f"{self.address}state?since=0"
            with urllib.request.urlopen(address, timeout=LIMIT_S) as answer:
                content = json.load(answer)["content"]
            if content and is_ready(content):
                return content
            assert time.monotonic() < deadline, content
            time.sleep(0.05)

    def end(self) -> tuple[int, str]:
        """Press Ctrl-C; returns the exit code and what was complained of."""
        self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, errors
