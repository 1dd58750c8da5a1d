"""What filters look at in a tensor's metadata, and in its file where neither a manifest nor the file's name says it.

The name of an old collection's file has no iteration and no rank, one of six parts no layer either; the file has them
beside the values. Files are opened for that only where a filter asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from quantexp.analysis.draw.arguments import NUMBERS
from quantexp.analysis.draw.chapter import Source
from quantexp.capture.reader import Capture, CapturedTensor
from quantexp.capture.store.values import metadata_in
from quantexp.errors import CaptureError

#: What a filter looks at, where that is not the key of its name.
_KEYS = {"type": ("quant_type", "layer_type")}


def values_of(metadata: Mapping[str, Any], name: str) -> list[Any]:
    """What a filter looks at in a tensor's metadata."""
    found = (metadata.get(key) for key in _KEYS.get(name, (name,)))
    return [value for value in found if value is not None]


def completed(source: Source, filters: Iterable[str], say: Callable[[str], None]) -> Source:
    """The source with what filters ask for, as far as its files say it; what is not known to the end is said."""
    entries = list(source.capture)
    for name in filters:
        asked = [i for i, entry in enumerate(entries) if not values_of(entry.metadata, name)]
        for i in asked:
            entries[i] = _with(entries[i], name, say)
        unknown = sum(not values_of(entries[i].metadata, name) for i in asked)
        if unknown:
            say(
                f"{source.label}: {unknown} of {len(entries)} tensors do not say their {name}: they are left out"
            )
    return replace(source, capture=Capture(source.capture.folder, entries))


def _with(entry: CapturedTensor, name: str, say: Callable[[str], None]) -> CapturedTensor:
    """The tensor with what its own file says; one that cannot be read is named."""
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
    return CapturedTensor(entry.folder, {**entry.metadata, name: value})
