"""Counts comparisons and mismatches, one row per format, kernel and oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantexp.extras.verify.exact import Case

Array = NDArray[Any]

#: Mismatches kept per row with their bits, for each kind of result.
EXAMPLES = 2


@dataclass(frozen=True)
class Mismatch:
    """One value that differs from the oracle's, in words and bits."""

    #: quantise, encode, scales, decode, ...
    what: str
    #: Dtype, shape and options.
    request: str
    at: list[int]
    #: Bits in hexadecimal followed by the value; None if no single element is at fault.
    input: str | None
    expected: str
    got: str


@dataclass
class Row:
    """A line of the table."""

    format: str
    kernel: str
    oracle: str
    #: Values compared.
    cases: int = 0
    mismatches: int = 0
    examples: list[Mismatch] = field(default_factory=list)


class Tally:
    """All rows, in the order in which they were first added."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str], Row] = {}

    @property
    def rows(self) -> list[Row]:
        """Every row so far."""
        return list(self._rows.values())

    @property
    def mismatches(self) -> int:
        """The mismatches of all rows."""
        return sum(row.mismatches for row in self._rows.values())

    def add(
        self,
        where: tuple[str, str, str],
        what: str,
        expected: Array,
        got: Array,
        *,
        case: Case | None = None,
        description: str = "",
        known: Array | None = None,
    ) -> None:
        """Compare two arrays bit for bit; NaN equals NaN of any payload.

        Args:
            where: format, kernel and oracle.
            what: the kind of result.
            expected: the oracle's result.
            got: the kernel's result; if its shape differs from `expected`, all of it counts as wrong.
            case: the case, whose elements are shown if the shapes are equal.
            description: describes the comparison if there is no `Case`.
            known: where the oracle follows the definition; the rest is neither compared nor counted.
        """
        row = self._rows.setdefault(where, Row(*where))
        description = describe(case) if case is not None else description
        if expected.shape != got.shape:
            row.cases += expected.size
            row.mismatches += max(1, expected.size)
            shapes = (str(expected.shape), str(got.shape))
            _note(row, Mismatch(f"shape of {what}", description, [], None, *shapes))
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
                    description,
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
    return sum(example.what == what for example in row.examples)


def differing(a: Array, b: Array) -> Array:
    """Where two arrays of one shape differ in a bit, including the sign of zero; NaN equals NaN."""
    if a.dtype == np.uint8:
        return np.asarray(a != b)
    a, b = (np.ascontiguousarray(v, dtype=np.float32) for v in (a, b))
    return np.asarray((a.view(np.int32) != b.view(np.int32)) & ~(np.isnan(a) & np.isnan(b)))


def describe(case: Case) -> str:
    """A case in words: dtype, shape and options."""
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
