"""Work beside training that jobs of a cluster may do: an array of tasks in parts, then a last job that joins them.

A verb divides its work by a class with the attributes of `DividedWork`. A launcher submits it (`Launcher.divide`), and
its jobs load it again from the file that the submission keeps, by the function in `_WORK_OF` or in its extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol, cast

from rich.console import Console

from quantexp.extra import verb_of_extra
from quantexp.runs.work_folder import WorkFolder

#: Verb -> `work_of(file, num_cores)` of its divided work; imported when needed, because some need torch.
_WORK_OF = {
    "prepare": "quantexp.data.prepare.divided:work_of",
    "draw": "quantexp.analysis.draw.divided:work_of",
}


class DividedWork(Protocol):
    """Work in parts, which are counted from 0."""

    @property
    def verb(self) -> str:
        """The verb of the command line; the names of submissions begin with it."""

    @property
    def parts(self) -> str:
        """What the parts are: `input files`."""

    @property
    def num_parts(self) -> int:
        """The number of all parts."""

    @property
    def folder(self) -> WorkFolder:
        """The folder of the partial results, with the hash of what decides the result."""

    @property
    def result(self) -> Path:
        """The file or folder that the work makes, as messages name it."""

    @property
    def content(self) -> Any:
        """A dataclass from whose JSON `work_of` makes the same work on another node."""

    def groups(self) -> list[list[int]]:
        """The parts without partial results, a group for each task; of fewer than two groups one job does the rest."""

    def begin(self) -> None:
        """Remove the partial results of other work; the caller has the folder alone."""

    def make(self, group: Sequence[int], console: Console) -> None:
        """Make the partial results of some parts that do not exist, beside other tasks."""

    def join(self, console: Console) -> int:
        """Make what is missing and join all; returns the exit code."""


def load_work(verb: str, file: Path, num_cores: int) -> DividedWork:
    """The work of a verb that was written to a file, with a process for each core unless it has their number.

    Raises:
        QuantexpError: the file is damaged, or what the work is made of cannot be read.
    """
    of_extra = verb_of_extra(verb)
    work_of = _WORK_OF[verb] if of_extra is None else of_extra.divided
    assert work_of is not None
    return cast(DividedWork, resolve_name(work_of)(file, num_cores))
