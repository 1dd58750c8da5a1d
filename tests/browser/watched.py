"""Runs that advance, and the server of the page that shows them."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

from quantexp.extras.forensics.watch.folder import FolderWatch
from quantexp.extras.forensics.watch.server import PageServer
from quantexp.extras.forensics.watch.server import page as page_about
from quantexp.runs.find import scope
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status, write_status
from tests.analysis.compare.runs import Runs
from tests.extras.forensics.watch.conftest import ledger

TOKEN = "t" * 32


class Watched:
    """A folder of two runs that advance, and the server of its page."""

    def __init__(self, root: Path) -> None:
        self.runs = Runs(root / "runs")
        self.bf16 = self.runs.add("bf16", [6.0, 5.0, 4.5], state=State.RUNNING, iterations=400)
        self.mxfp4 = self.runs.add(
            "linear_mxfp4", [6.2, 5.3, 4.9], state=State.RUNNING, iterations=400
        )
        self.server: PageServer | None = None
        self.bugs: list[Exception] = []

    def start(self, port: int = 0) -> str:
        root = self.runs.root
        watch = FolderWatch(lambda: scope(None, root), ledger, root)
        self.server = PageServer(port, TOKEN, watch, page_about(str(root)), self.bugs.append)
        self._threads = [
            threading.Thread(target=self.server.serve),
            threading.Thread(target=watch.run),
        ]
        for thread in self._threads:
            thread.start()
        return self.server.address

    def stop(self) -> None:
        if self.server is None:
            return
        self.server.watch.close()
        self.server.end()
        for thread in self._threads:
            thread.join(60)
        self.server.close()
        self.server = None

    def advance(self, run: RunDir, last: int, loss: float = 4.0) -> None:
        """Train up to an iteration."""
        status = read_status(run.status)
        assert status is not None
        with run.metrics.open("a") as stream:
            for iteration in range(status.iteration + 1, last + 1):
                stream.write(json.dumps({"iteration": iteration, "loss": loss}) + "\n")
        write_status(run.status, replace(status, iteration=last))
