"""A capture folder, once nobody writes to it any more: one list, every shard sealed, an index."""

from __future__ import annotations

import sys
from pathlib import Path

from quantexp.capture.store.manifest import join_parts
from quantexp.capture.store.sealing import finish_shards


def finish_capture(folder: Path) -> None:
    """Join what the ranks listed, seal what they left open, and write the shards' index.

    Done again it changes nothing. A disk that is full is told and ends nothing: everything can be read all the same.
    """
    try:
        join_parts(folder)
        finish_shards(folder)
    except OSError as error:
        sys.stderr.write(f"the lists of {folder} are left in parts: {error.strerror}\n")
