"""C compiled on first use and kept: `library` compiles a file of this package for this machine and loads it.

The shared object lies in the user's cache (`$XDG_CACHE_HOME/quantexp/compiled/`) under a name that follows from the
source, the headers beside it, the compiler, its options and the processor, so that what was compiled for another
machine is never loaded. It is written beside and renamed: processes that compile at once do not meet. The compiler is
`$CC`, else cc, gcc or clang; without one, or with QUANTEXP_COMPILE=0, there is no library, and whoever asked falls back
to torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from quantexp.folders import cache_dir

#: Set to 0, nothing is compiled.
VARIABLE = "QUANTEXP_COMPILE"
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-Wno-psabi")
_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT_S = 120


@dataclass(frozen=True)
class Compiled:
    """A library, or why there is none."""

    library: ctypes.CDLL | None
    #: For a person: the compiler that was used, or what stands in the way.
    words: str


@cache
def library(source: Path, otherwise: str) -> Compiled:
    """The library of one C file; compiled if this machine has none of it yet.

    Whatever stands in the way is said on stderr, once for each file and process, and what happens `otherwise`; it is no
    error.
    """
    found = compiled(source)
    if found.library is None:
        sys.stderr.write(f"{source.name}: {found.words}; {otherwise}\n")
    return found


def compiler() -> str | None:
    """The C compiler's path."""
    given = os.environ.get("CC")
    names = (given,) if given else _COMPILERS
    return next((found for name in names if (found := shutil.which(name))), None)


def compiled(source: Path) -> Compiled:
    """The library of one C file, compiled if this machine has none of it yet; says nothing on stderr."""
    if os.environ.get(VARIABLE) == "0":
        return Compiled(None, f"not compiled, as {VARIABLE}=0 says")
    command = compiler()
    if command is None:
        given = os.environ.get("CC")
        wanted = f"CC={given}, which is not there" if given else "no C compiler (cc, gcc, clang)"
        return Compiled(None, f"not compiled: {wanted}")
    try:
        version = _run([command, "--version"]).splitlines()[0]
        path = _path(source, version)
        return Compiled(_opened(path) or _compile(command, source, path), version)
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["it says nothing"])[0]
        return Compiled(None, f"not compiled: {command} failed: {reason}")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Compiled(None, f"not compiled: {error}")


def _path(source: Path, version: str) -> Path:
    headers = sorted(source.parent.glob("*.h"))
    texts = [file.read_text() for file in (source, *headers)]
    words = [*texts, version, *FLAGS, platform.machine(), _processor()]
    key = hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
    return cache_dir(None) / "compiled" / f"{source.stem}-{key}.so"


def _processor() -> str:
    """What tells processors apart whose code differs: the instructions they have."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    told = ("model name", "flags", "features", "cpu part")
    return "\n".join(sorted({line for line in lines if line.lower().startswith(told)}))


def _opened(path: Path) -> ctypes.CDLL | None:
    """What was compiled before; None where nothing was, or what is there is damaged."""
    try:
        return ctypes.CDLL(str(path)) if path.is_file() else None
    except OSError:
        return None


def _compile(command: str, source: Path, path: Path) -> ctypes.CDLL:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        beside = Path(folder) / path.name
        _run([command, *FLAGS, str(source), "-o", str(beside), "-lm"])
        beside.rename(path)
    return ctypes.CDLL(str(path))


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S, errors="replace"
    )
    return done.stdout
