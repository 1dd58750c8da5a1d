"""Compiles C on first use: `library` compiles a file of this package for this machine, caches it and loads it.

The shared object is in the user's cache (`$XDG_CACHE_HOME/quantexp/compiled/`). Its name is derived from the source,
the headers beside it, the compiler, its options and the processor, so a library compiled for another machine is never
loaded. It is written under a temporary name and renamed, so processes that compile at the same time do not interfere.
The compiler is `$CC`, else cc, gcc or clang; without a compiler, or with QUANTEXP_COMPILE=0, there is no library, and
the caller falls back to torch. `address` is the only way by which a tensor's memory reaches compiled code.
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
from typing import TYPE_CHECKING

from quantexp.folders import cache_dir

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: The environment variable that disables compilation with the value 0.
VARIABLE = "QUANTEXP_COMPILE"
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-Wno-psabi")
_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT_S = 120


@dataclass(frozen=True)
class Compiled:
    """A library, or the reason for its absence."""

    library: ctypes.CDLL | None
    #: The compiler, or the reason, for the user.
    words: str


@cache
def library(source: Path, otherwise: str) -> Compiled:
    """The library of one C file, compiled if it is not in the cache.

    A failure is not an error: it prints the reason and the consequence `otherwise` to stderr, once for each file and
    process.
    """
    result = compiled(source)
    if result.library is None:
        sys.stderr.write(f"{source.name}: {result.words}; {otherwise}\n")
    return result


def address(x: Tensor, num_elements: int, *dtypes: torch.dtype) -> int:
    """The address of a CPU tensor's elements, for compiled code that reads or writes `num_elements` of them in a row.

    Valid while the tensor lives.

    Raises:
        ValueError: memory there is not that: another device, dtype or number, gaps, a lazy sign, or a shorter storage.
    """
    if not x.is_cpu or x.dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        raise ValueError(f"compiled code takes {expected} on the CPU, got {x.dtype} on {x.device}")
    if x.numel() != num_elements or not x.is_contiguous() or x.is_neg() or x.is_conj():
        raise ValueError(
            f"compiled code takes {num_elements} elements in a row, got shape {list(x.shape)} with strides {x.stride()}"
        )
    needed, stored = x.storage_offset() * x.itemsize + x.nbytes, x.untyped_storage().nbytes()
    if num_elements and needed > stored:
        raise ValueError(
            f"a tensor of shape {list(x.shape)} needs {needed} bytes, and its storage has {stored}"
        )
    return x.data_ptr()


def compiler() -> str | None:
    """The C compiler's path; None if there is none."""
    chosen = os.environ.get("CC")
    names = (chosen,) if chosen else _COMPILERS
    return next((path for name in names if (path := shutil.which(name))), None)


def compiled(source: Path) -> Compiled:
    """The library of one C file, compiled if it is not in the cache; prints nothing."""
    if os.environ.get(VARIABLE) == "0":
        return Compiled(None, f"not compiled, as {VARIABLE}=0 says")
    command = compiler()
    if command is None:
        chosen = os.environ.get("CC")
        reason = f"CC={chosen}, which is not there" if chosen else "no C compiler (cc, gcc, clang)"
        return Compiled(None, f"not compiled: {reason}")
    try:
        version = _run([command, "--version"]).splitlines()[0]
        path = _path(source, version)
        return Compiled(_load_cached(path) or _compile(command, source, path), version)
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
    """The lines of /proc/cpuinfo that identify the processor's instruction set."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    keys = ("model name", "flags", "features", "cpu part")
    return "\n".join(sorted({line for line in lines if line.lower().startswith(keys)}))


def _load_cached(path: Path) -> ctypes.CDLL | None:
    """Load the cached library; None if there is none, or if it is damaged."""
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
    completed = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S, errors="replace"
    )
    return completed.stdout
