"""The dossiers of a run: what went wrong and when, and the request for one from outside.

    dossiers/iteration_00000012/   dossier.json      what, when, and what there is of it
                                   statistics.jsonl  of all sites, of the iterations up to this one (`capture.ring`)
                                   tokens.jsonl      the data of these iterations and of the next one
                                   manifest.jsonl    the values of the next iteration, in the files that it names

The folder can be read as any folder of captured tensors; dossier.json is written after everything it speaks of.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from quantexp.errors import UnreadableError
from quantexp.folders import sync
from quantexp.reading.json_files import require_json
from quantexp.reading.typed import REQUIRED, Count
from quantexp.runs.paths import RunDir
from quantexp.runs.status import Time, write_json

DOSSIER = "dossier.json"
_NAME = re.compile(r"iteration_(\d{8,})")


class Trigger(StrEnum):
    """What caused a dossier."""

    NONFINITE = "nonfinite"
    LOSS = "loss"
    GRAD_NORM = "grad_norm"
    SATURATED = "saturated"
    UNDERFLOW = "underflow"
    #: `quantexp capture RUN`, or SIGUSR2.
    REQUEST = "request"


@dataclass(frozen=True)
class Dossier:
    """The content of dossier.json."""

    #: The iteration after which it was written.
    iteration: Count = field(metadata=REQUIRED)
    time: Time = field(metadata=REQUIRED)
    trigger: Trigger = field(metadata=REQUIRED)
    #: What happened, in one line.
    words: str = field(metadata=REQUIRED)
    #: The first and last iteration whose statistics it has; None without a ring.
    ring: list[Count] | None = None
    #: The newest checkpoint before the iteration, with the training state; None without one.
    checkpoint: Count | None = None
    #: The iteration whose values it has; None until they are written, and where no iteration followed.
    whole_iteration: Count | None = None
    tensors: Count = 0
    num_bytes: Count = 0


def folder_of(run: RunDir, iteration: int) -> Path:
    """The folder of the dossier after an iteration."""
    return run.dossiers / f"iteration_{iteration:08d}"


def write_dossier(run: RunDir, dossier: Dossier) -> None:
    """Write dossier.json.

    Raises:
        OSError: it cannot be written.
    """
    write_json(folder_of(run, dossier.iteration) / DOSSIER, asdict(dossier))


def dossier_files(run: RunDir) -> list[Path]:
    """dossier.json of each dossier of a run, the oldest first."""
    if not run.dossiers.is_dir():
        return []
    folders = (each for each in run.dossiers.iterdir() if _NAME.fullmatch(each.name))
    return sorted(file for each in folders if (file := each / DOSSIER).is_file())


def read_dossier(file: Path) -> Dossier:
    """The content of a dossier.json.

    Raises:
        UnreadableError: names the file and what is wrong with it.
    """
    return require_json(file, Dossier)


def read_dossiers(run: RunDir) -> Iterator[Dossier]:
    """The complete dossiers of a run, the oldest first; unreadable ones are left out."""
    for file in dossier_files(run):
        with contextlib.suppress(UnreadableError):
            yield read_dossier(file)


def request_dossier(run: RunDir) -> None:
    """Ask the running run for a dossier.

    Raises:
        OSError: the request cannot be written.
    """
    run.capture_request.touch()
    sync(run.root)


def take_request(run: RunDir) -> bool:
    """Whether there is a request, which is deleted."""
    try:
        run.capture_request.unlink()
    except OSError:
        return False
    return True
