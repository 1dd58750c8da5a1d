"""What a tracker has been told so far: a file that its courier writes, and others read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from quantexp.runs.redaction import redacted
from quantexp.runs.status import write_json

#: Characters of a library's error message that are put on record.
LONGEST = 240


@dataclass
class Delivery:
    """How far one tracker is with one attempt at a run."""

    #: Where a person finds the run, once the tracker has it.
    where: str = ""
    #: The tracker's own id of the run.
    id: str | None = None
    #: The last iteration it was told.
    iteration: int = 0
    #: Bytes of metrics.jsonl that it was told.
    offset: int = 0
    #: Whether it was told the end.
    ended: bool = False
    #: What is wrong with it, in one line; empty once all is well again.
    trouble: str = ""


def trouble_of(error: Exception) -> str:
    """An error in one line, without secrets; a long one is cut."""
    first = (str(error).strip().splitlines() or [""])[0]
    text = str(redacted(f"{type(error).__name__}: {first}"))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def read_delivery(file: Path) -> Delivery:
    """What the file says; a new delivery where there is none, or none that can be read."""
    try:
        return Delivery(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return Delivery()


def write_delivery(file: Path, delivery: Delivery) -> None:
    """Replace the file."""
    write_json(file, asdict(delivery))
