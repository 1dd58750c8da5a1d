"""Transformer Engine's Python, without its libraries: the wheel of a version, downloaded by pip and unpacked once."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

#: The newest version that Megatron-Core 0.16 names, and one after the changes of 2.12 and 2.13.
VERSIONS = ("2.11.0", "2.13.0")
#: The newest, for what a custom recipe and the proof depend on: it has other roles, and makes tensors in native code.
LATER = "2.20.2"


def unpacked_wheel(version: str) -> Path:
    """The folder of a version's wheel.

    Raises:
        RuntimeError: pip cannot download it.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "quantexp-tests" / "transformer-engine" / version
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        name = f"transformer-engine=={version}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        pip += ["--only-binary=:all:", "--dest", scratch, name]
        process = subprocess.run(pip, capture_output=True, text=True, timeout=300)
        if process.returncode:
            raise RuntimeError(
                f"the tests of the Transformer Engine backend need the wheel {name} (0.7 MB, pure Python), which pip "
                f"could not download; run it once with access to a package index: {process.stderr.strip()}"
            )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(Path(scratch) / "unpacked")
        try:
            (Path(scratch) / "unpacked").rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder
