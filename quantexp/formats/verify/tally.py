"""Counting what was compared and what differed, a row for each format, kernel and oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantexp.formats.verify.exact import Case

Array = NDArray[Any]

#: mismatches of a row that are kept with their bits, of each kind of result.
EXAMPLES = 2


@dataclass(frozen=True)
class Mismatch:
    """One value that is not what the oracle says, in words and bits."""

    #: quantise, encode, scales, decode, ...
    what: str
    #: dtype, shape and options.
    asked: str
    at: list[int]
    #: bits in hexadecimal with the value behind; None where no single element is at fault.
    input: str | None
    expected: str
    got: str


@dataclass
class Row:
    """A line of the table."""

    format: str
    kernel: str
    oracle: str
    #: values compared.
    cases: int = 0
    mismatches: int = 0
    examples: list[Mismatch] = field(default_factory=list)


class Tally:
    """All rows, in the order in which they were first added to."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str], Row] = {}

    @property
    def rows(self) -> list[Row]:
        """Every row so far."""
        return list(self._rows.values())

    @property
    def mismatches(self) -> int:
        """Of all rows."""
        return sum(row.mismatches for row in self._rows.values())

    def add(
        self,
        where: tuple[str, str, str],
        what: str,
        expected: Array,
        got: Array,
        *,
        case: Case | None = None,
        asked: str = "",
        known: Array | None = None,
    ) -> None:
        """Compare two arrays bit for bit; NaN equals NaN of any payload.

        Args:
            where: format, kernel and oracle.
            what: which result of the kernel it is.
            expected: by the oracle.
            got: of the kernel, in another shape than `expected`: all of it counts as wrong.
            case: what was asked, whose elements are shown where the shapes are the same.
            asked: the same in words where it is no `Case`.
            known: where the oracle follows the definition; the rest is not compared and not counted.
        """
        row = self._rows.setdefault(where, Row(*where))
        asked = describe(case) if case is not None else asked
        if expected.shape != got.shape:
            row.cases += expected.size
            row.mismatches += max(1, expected.size)
            shapes = (str(expected.shape), str(got.shape))
            _note(row, Mismatch(f"shape of {what}", asked, [], None, *shapes))
            return
        wrong = differing(expected, got)
        if known is not None:
            wrong &= known
        row.cases += int(expected.size if known is None else known.sum())
        if not wrong.any():
            return
        row.mismatches += int(wrong.sum())
        missing = EXAMPLES - _kept(row, what)
        for index in np.argwhere(wrong)[: max(0, missing)]:
            at = tuple(index.tolist())
            shown = case is not None and case.x.shape == expected.shape
            _note(
                row,
                Mismatch(
                    what,
                    asked,
                    list(at),
                    bits(case.x[at], case.dtype) if case is not None and shown else None,
                    bits(expected[at]),
                    bits(got[at]),
                ),
            )


def _note(row: Row, mismatch: Mismatch) -> None:
    if _kept(row, mismatch.what) < EXAMPLES:
        row.examples.append(mismatch)


def _kept(row: Row, what: str) -> int:
    return sum(one.what == what for one in row.examples)


def differing(a: Array, b: Array) -> Array:
    """Where two arrays of one shape differ in a bit, the sign of a zero included; NaN does not differ from NaN."""
    if a.dtype == np.uint8:
        return np.asarray(a != b)
    a, b = (np.ascontiguousarray(v, dtype=np.float32) for v in (a, b))
    return np.asarray((a.view(np.int32) != b.view(np.int32)) & ~(np.isnan(a) & np.isnan(b)))


def describe(case: Case) -> str:
    """A case in words: its format's options, dtype and shape."""
    words = [case.dtype, "x".join(map(str, case.x.shape))]
    words += [f"axis={case.axis}"] if case.axis != -1 else []
    words += [f"{name}={value}" for name, value in case.options.items()]
    words += [name for name in ("packed", "strided") if getattr(case, name)]
    return " ".join(words)


def bits(value: Any, dtype: str = "float32") -> str:
    """The bits of a number in hexadecimal, and the number."""
    if isinstance(value, np.uint8):
        return f"{int(value):#04x}"
    single = np.float32(value)
    number = int(single.view(np.uint32))
    shown = "nan" if math.isnan(single) else f"{float(single):.9g}"
    if dtype == "bfloat16":
        return f"{number >> 16:#06x} ({shown})"
    if dtype == "float16":
        return f"{int(np.float16(single).view(np.uint16)):#06x} ({shown})"
    return f"{number:#010x} ({shown})"
