"""Finishes a capture folder after the last write: joins the ranks' lists, writes the index of the shards.

It needs no torch, because the end of a SLURM job has only seconds.
"""

from __future__ import annotations

import logging
from pathlib import Path

from quantexp.capture.store.manifest import MANIFEST, join_parts, lines_of
from quantexp.runs.status import write_json

LOG = logging.getLogger(__name__)

#: The shards' index, in the usual form of safetensors.
INDEX = "capture.safetensors.index.json"


def finish_capture(folder: Path) -> None:
    """Join the ranks' lists, and write the shards' index.

    The operation is idempotent. A full disk only prints a message, because the captures can be read without it.
    """
    try:
        join_parts(folder)
        _write_index(folder)
    except OSError as error:
        LOG.warning("the lists of %s are left in parts: %s", folder, error.strerror)


def _write_index(folder: Path) -> None:
    lines = {
        str(line["key"]): line
        for line in lines_of(folder / MANIFEST)
        if line.get("key") is not None
    }
    if lines:
        total = sum(int(line["bytes"]) for line in lines.values())
        weight_map = {key: str(line["file"]) for key, line in lines.items()}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
