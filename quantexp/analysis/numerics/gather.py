"""Computes the measures of every tensor of one or more captures, with one tensor in memory at a time.

What is kept of a tensor is a few hundred numbers, so that a collection may be larger than memory. Tensors of which
only statistics were captured are taken from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from quantexp.analysis.chapter import Desk, Source
from quantexp.analysis.numerics.measured import Measured, Request, measure, of_statistics
from quantexp.capture.reader import CapturedTensor

#: The formats for judging a run without quantised operands.
USUAL_FORMATS = ("mxfp8", "mxfp4", "hifp8")
_UNQUANTISED = frozenset({"bf16", "fp16", "fp32", "reuse", None})


@dataclass(frozen=True)
class Run:
    """One source with its measures."""

    label: str
    scheme: str
    tensors: tuple[Measured, ...]


class _Last:
    """A cache of the last sources, because the chapters of one `draw` use the same list one after the other."""

    sources: Sequence[Source] | None = None
    runs: Sequence[Run] = ()


def gather(sources: Sequence[Source], desk: Desk) -> Sequence[Run]:
    """All sources, tensor by tensor, without unreadable tensors (which `desk.each` reports).

    The same list of sources is gone through once.
    """
    if _Last.sources is not sources:
        _Last.runs = tuple(_run(source, desk) for source in sources)
        _Last.sources = sources
    return _Last.runs


def look_of(source: Source) -> Callable[[CapturedTensor], Measured]:
    """The look at each stored tensor of a source."""
    formats = () if any(map(is_quantised, source.capture)) else USUAL_FORMATS
    return partial(measure, request=Request(formats))


def _run(source: Source, desk: Desk) -> Run:
    measured = [one for _, one in desk.each(look_of(source), source.entries)]
    bare = [of_statistics(entry.metadata) for entry in source.capture.described()]
    return Run(source.label, source.scheme, tuple(measured + bare))


def is_quantised(entry: CapturedTensor) -> bool:
    """Whether any slot of the tensor's module has a format."""
    slots = (entry.metadata.get("formats") or {}).values()
    return any(slot.get("format") not in _UNQUANTISED for slot in slots)
