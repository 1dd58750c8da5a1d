"""Finishes a capture folder after the last write: joins the lists, seals the shards, writes the index."""

from __future__ import annotations

import sys
from pathlib import Path

from quantexp.capture.store.manifest import join_parts
from quantexp.capture.store.sealing import finish_shards


def finish_capture(folder: Path) -> None:
    """Join the ranks' lists, seal their open shards, and write the shards' index.

    The operation is idempotent. A full disk only prints a message, because the captures can be read without it.
    """
    try:
        join_parts(folder)
        finish_shards(folder)
    except OSError as error:
        sys.stderr.write(f"the lists of {folder} are left in parts: {error.strerror}\n")
