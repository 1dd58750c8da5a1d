"""A requantise divided among jobs: its parts are the captured tensors. See `quantexp.launch.divided_work`.

A task keeps the scores of its tensors beside the output folder; the last job runs the ordinary command, which finds
them. It gives the same files, because scores are computed tensor by tensor and added up in the order of the capture.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from rich.console import Console

from quantexp.capture.reader import Capture
from quantexp.capture.store.values import identity
from quantexp.errors import CaptureError
from quantexp.extras.requantise.arguments import Request
from quantexp.extras.requantise.kept import VERSION, KeptScores
from quantexp.extras.requantise.passing import passed
from quantexp.extras.requantise.requantising import files_of, requantise, work_on
from quantexp.folders import user_path
from quantexp.processes.groups import balanced, num_groups
from quantexp.reading.json_files import require_json
from quantexp.runs.work_folder import WorkFolder
from quantexp.terminal.console import output_console
from quantexp.terminal.messages import complain


@dataclass(frozen=True)
class RequantiseFolder(WorkFolder):
    """`OUTPUT.partial`: the scores of each tensor."""

    activity = "requantises"
    elsewhere = "--out"
    error = CaptureError


@dataclass(frozen=True)
class Content:
    """A request as its jobs read it; see `Request`."""

    folder: str
    words: list[str]
    formats: str | None
    sqnr_db: float
    num_elements: int
    jobs: int | None
    out: str | None
    definitions: dict[str, str]

    def request(self) -> Request:
        """The request."""
        return Request(**asdict(self) | {"out": None if self.out is None else Path(self.out)})


@dataclass(frozen=True)
class DividedRequantise:
    """A request and its division."""

    request: Request
    files: Capture
    verb: str = "requantise"
    parts: str = "tensors"

    @property
    def num_parts(self) -> int:
        """The number of tensors."""
        return len(self.files)

    @property
    def content(self) -> Content:
        """The request."""
        values = asdict(self.request)
        return Content(**values | {"out": None if values["out"] is None else str(values["out"])})

    @cached_property
    def folder(self) -> RequantiseFolder:
        """`OUTPUT.partial`."""
        return RequantiseFolder(self.result.with_name(f"{self.result.name}.partial"), self._hash)

    @property
    def result(self) -> Path:
        """The output folder."""
        return user_path(self.request.output).absolute()

    def groups(self) -> list[list[int]]:
        """The tensors without scores, in groups of about the same number of bytes."""
        missing = self._kept.missing(list(self.files))
        sizes = [int(entry.metadata.get("bytes") or 0) for entry in self.files]
        return balanced(sizes, missing, num_groups(len(missing)))

    def begin(self) -> None:
        """Remove the scores of other requests."""
        self.folder.begin()

    def make(self, group: Sequence[int], console: Console) -> None:
        """Score the tensors of one task."""
        work, jobs = work_on(self.request), self.request.jobs or 1
        files = Capture(self.files.folder, [self.files[index] for index in group])
        left = len(self._kept.missing(list(files)))
        if left < len(group):
            console.print(f"resuming: {len(group) - left} of {len(group)} tensors are scored")
        with self.folder.writing(), closing(passed(files, work, jobs, self._kept.score)) as every:
            problems = sum(scores.problem is not None for scores in every)
        words = f"{len(group)} of {len(self.files)} tensors are scored"
        if problems:
            words += f", {problems} of them cannot be used: the last job names them"
        console.print(words)

    def join(self, console: Console) -> int:
        """Run the ordinary command, which finds the scores, and print its table."""
        with self.folder.writing():
            self.folder.outputs.mkdir(parents=True, exist_ok=True)
        outcome = requantise(self.request, console, complain, self._kept.score)
        outcome.print(output_console())
        shutil.rmtree(self.folder.root, ignore_errors=True)
        return outcome.exit_code(complain)

    @property
    def _kept(self) -> KeptScores:
        return KeptScores(self.folder.outputs)

    @property
    def _hash(self) -> str:
        request = self.request
        about = [VERSION, str(self.files.folder.absolute()), request.formats, request.num_elements]
        about += [request.definitions] if request.definitions else []
        decides = [*about, request.sqnr_db, [identity(entry.metadata) for entry in self.files]]
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]


def divided(request: Request) -> DividedRequantise:
    """A request as work for jobs.

    Raises:
        CaptureError: nothing captured, selected, with values, or an operand.
        ConfigError: an unknown format.
    """
    work_on(request)
    return DividedRequantise(request, files_of(request))


def work_of(file: Path, num_cores: int) -> DividedRequantise:
    """The request that was submitted, with a tensor at a time for each core unless it has their number.

    Raises:
        UnreadableError: the file is damaged.
        CaptureError: as `divided`.
    """
    request = require_json(file, Content).request()
    return divided(replace(request, jobs=request.jobs or num_cores))
