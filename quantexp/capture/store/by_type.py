"""`capture.layout=by_type`: the files of all runs in folders of their formats, as the old collections had them.

    DIR/<run>/mxfp8/NAME.pt    the run's own, which its manifest names
    DIR/mxfp8/NAME.pt          a hard link to it, which takes no space

The names of two runs differ by the second of their start. Where they are equal, the later link has the next free
second. A link goes with its file: when a resumed run drops what came after its checkpoint, or an attempt is set aside.
Needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path

_STAMP = "%Y%m%d_%H%M%S"
_STAMP_LENGTH = len("20260101_000000")


def link(folder: Path, name: str) -> None:
    """Link a file of a capture folder into the folder of its format beside the capture folder.

    Args:
        folder: the run's capture folder.
        name: the file's name relative to it, `mxfp8/20260101_000000_0001_....pt`.

    Raises:
        OSError: the link cannot be made, for instance on a file system without hard links.
    """
    source, target = folder / name, folder.parent / name
    target.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            os.link(source, target)
        except FileExistsError:
            if target.samefile(source):
                return
            target = target.with_name(_a_second_later(target.name))
        else:
            return


def unlink(folder: Path, files: Iterable[Path]) -> None:
    """Remove the links to files of a capture folder; files without links are ignored.

    Raises:
        OSError: a file or a link cannot be read or removed.
    """
    stats = [file.stat() for file in files]
    linked = {(stat.st_dev, stat.st_ino) for stat in stats if stat.st_nlink > 1}
    if linked:
        for path in folder.parent.glob("*/*.pt"):
            if ((stat := path.stat()).st_dev, stat.st_ino) in linked:
                path.unlink()


def _a_second_later(name: str) -> str:
    time = datetime.strptime(name[:_STAMP_LENGTH], _STAMP) + timedelta(seconds=1)
    return f"{time.strftime(_STAMP)}{name[_STAMP_LENGTH:]}"
