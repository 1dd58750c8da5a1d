"""Writes many files in one call of compiled code (`files.c`), without holding the GIL.

Opening, writing and renaming a file in Python each release and reacquire the GIL. While training calls one torch
operation after another, a thread that waits for the GIL wakes up at each of them and usually loses the race, which
costs half a millisecond of processor time, several times that of the write.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from quantexp.capture.store.direct import CALL_BYTES, CALL_PARTS, address_of
from quantexp.folders import beside
from quantexp.processes.compiled import compiled

SOURCE = Path(__file__).with_name("files.c")
#: The warning when Python code is used instead.
SLOWER = "files of captures are written one by one"


class _Part(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


class _Job(ctypes.Structure):
    _fields_ = (
        ("beside", ctypes.c_char_p),
        ("path", ctypes.c_char_p),
        ("parts", ctypes.c_void_p),
        ("num_parts", ctypes.c_int64),
        ("num_bytes", ctypes.c_int64),
        ("past_cache", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Whole:
    """A file and its complete content, in an existing folder."""

    path: Path
    parts: Sequence[memoryview]
    #: Whether the write may bypass the page cache: page-aligned, whole pages.
    past_cache: bool

    @property
    def num_bytes(self) -> int:
        """The bytes of its content."""
        return sum(map(len, self.parts))


def takes(whole: Whole) -> bool:
    """Whether a file can be written in one call; never without a C compiler."""
    is_one_call = whole.num_bytes <= CALL_BYTES and len(whole.parts) <= CALL_PARTS
    return is_one_call and _function() is not None


def write_files(files: Sequence[Whole]) -> int:
    """Write files that `takes` accepts, each beside its place and then renamed.

    Returns the number of files written, in order; the file after them was not written at all.
    """
    if not files:
        return 0
    function = _function()
    assert function is not None, "taken where there is one"
    jobs, part_arrays = (_Job * len(files))(), list[ctypes.Array[_Part]]()
    for job, whole in zip(jobs, files, strict=True):
        parts = (_Part * len(whole.parts))()
        for part, content in zip(parts, whole.parts, strict=True):
            part.start, part.num_bytes = address_of(np.frombuffer(content, np.uint8)), len(content)
        part_arrays.append(parts)
        job.beside, job.path = os.fsencode(beside(whole.path)), os.fsencode(whole.path)
        job.parts, job.num_parts = ctypes.addressof(parts), len(parts)
        job.num_bytes, job.past_cache = whole.num_bytes, whole.past_cache
    return function(ctypes.addressof(jobs), len(jobs))


@cache
def _function() -> Callable[[int, int], int] | None:
    files_library = compiled(SOURCE).library
    if files_library is None:
        return None
    function = files_library.write_files
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_int64
    return function
