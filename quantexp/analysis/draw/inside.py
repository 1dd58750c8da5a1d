"""The metadata for filters, read from a tensor's file if neither the manifest nor the file name has it.

The name of an old collection's file has no iteration and no rank, one of six parts no layer either; the file has them
beside the values. Files are opened for that only where a filter asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from quantexp.analysis.chapter import Source
from quantexp.analysis.draw.arguments import NUMBERS
from quantexp.capture.reader import Capture, CapturedTensor
from quantexp.capture.store.values import metadata_in
from quantexp.errors import CaptureError

#: Filter -> key of the metadata, if its name differs.
_KEYS = {"type": ("quant_type", "layer_type")}


def values_of(metadata: Mapping[str, Any], name: str) -> list[Any]:
    """The value of a filter's key in a tensor's metadata."""
    found = (metadata.get(key) for key in _KEYS.get(name, (name,)))
    return [value for value in found if value is not None]


def completed(source: Source, filters: Iterable[str], say: Callable[[str], None]) -> Source:
    """The source with the metadata for the filters completed from its files; reports values that stay unknown."""
    entries = list(source.capture)
    for name in filters:
        absent = [i for i, entry in enumerate(entries) if not values_of(entry.metadata, name)]
        for i in absent:
            entries[i] = _with(entries[i], name, say)
        unknown = sum(not values_of(entries[i].metadata, name) for i in absent)
        if unknown:
            say(
                f"{source.label}: {unknown} of {len(entries)} tensors do not say their {name}: they are left out"
            )
    return replace(source, capture=Capture(source.capture.folder, entries))


def _with(entry: CapturedTensor, name: str, say: Callable[[str], None]) -> CapturedTensor:
    """The tensor with the metadata of its file; reports a file that cannot be read."""
    if not entry.metadata.get("file") or entry.metadata.get("key") is not None:
        return entry
    try:
        value: object = metadata_in(entry.path).get(name)
    except (CaptureError, OSError) as error:
        say(str(error))
        return entry
    if name in NUMBERS:
        value = int(str(value)) if str(value).isdecimal() else None
    if not isinstance(value, int | str):
        return entry
    return CapturedTensor.of(entry.folder, {**entry.metadata, name: value})
