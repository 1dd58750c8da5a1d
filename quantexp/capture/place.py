"""Where the captured tensors of a folder are: in it, in its `tensors/`, or where its run wrote them (`capture.dir`)."""

from __future__ import annotations

from pathlib import Path

from quantexp.capture.store.manifest import MANIFEST
from quantexp.errors import UnreadableError
from quantexp.reading.yaml_files import read_yaml
from quantexp.runs.paths import RunDir
from quantexp.runs.recorded_config import moved


def place_of_captures(folder: Path) -> Path:
    """The folder with the captured tensors of a run or of a capture folder, which need not exist."""
    if (folder / MANIFEST).is_file():
        return folder
    elsewhere = _capture_dir(RunDir(folder.absolute()))
    if elsewhere is not None:
        return RunDir(folder.absolute()).captured(elsewhere)
    return folder / "tensors" if (folder / "tensors").is_dir() else folder


def _capture_dir(run: RunDir) -> str | None:
    """`capture.dir` of a run; None if it is not set, or if this is not a run.

    Read without the schema, which another version of quantexp may have written.
    """
    try:
        config = read_yaml(run.config)
        value, root = config["capture"]["dir"], config["paths"]["root"]
    except (FileNotFoundError, UnreadableError, KeyError, TypeError):
        return None
    if not isinstance(value, str) or not isinstance(root, str):
        return None
    return moved(value, root, run.root.parent)
