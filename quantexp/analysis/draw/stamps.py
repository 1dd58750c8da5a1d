"""The list of finished chapters in an output folder.

A chapter looks at many tensors, so it is drawn again when any of them has changed, was added or left out, or a file of
it is gone; and always after one whose work met files that could not be used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quantexp.errors import RunError
from quantexp.runs.status import read_json, write_json

NAME = ".chapters.json"


class Stamps:
    """The list of an output folder; `force` starts a new one."""

    def __init__(self, out: Path, *, force: bool = False) -> None:
        self._out = out
        try:
            known = {} if force or not self._path.is_file() else read_json(self._path)
        except RunError:
            known = {}
        self._known: dict[str, Any] = known if isinstance(known, dict) else {}

    @property
    def _path(self) -> Path:
        return self._out / NAME

    def kept_or(
        self, name: str, about: Any, make: Callable[[], Sequence[Path]], whole: Callable[[], bool]
    ) -> int:
        """The number of a chapter's files; draws the chapter unless its inputs `about` are unchanged.

        `whole` tells afterwards whether it may be kept.

        Raises:
            OSError: the folder cannot be written.
        """
        key = hashlib.sha256(json.dumps(about).encode()).hexdigest()
        known = self._known.get(name)
        if isinstance(known, dict) and known.get("key") == key:
            files = known.get("files", [])
            if all((self._out / file).is_file() for file in files):
                return len(files)
        files = [str(path.relative_to(self._out)) for path in make()]
        if whole():
            self._known[name] = {"key": key, "files": files}
            self._out.mkdir(parents=True, exist_ok=True)
            write_json(self._path, self._known)
        return len(files)
