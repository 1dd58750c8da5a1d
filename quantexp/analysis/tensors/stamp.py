"""What shows that a captured tensor is the one that an earlier command looked at."""

from __future__ import annotations

import os
from typing import Any

from quantexp.capture.reader import CapturedTensor


def stamp_of(entry: CapturedTensor) -> list[Any]:
    """Size and time of the file, the place in it, and the hash of the values; as JSON has them.

    Raises:
        CaptureError: the entry has no file, or one outside its folder.
        OSError: the file is not there.
    """
    stat = os.stat(entry.path)  # noqa: PTH116
    metadata = entry.metadata
    offsets = metadata.get("offsets")
    place = [metadata.get("key"), list(offsets) if offsets else None, metadata.get("hash")]
    return [stat.st_size, stat.st_mtime_ns, *place]
