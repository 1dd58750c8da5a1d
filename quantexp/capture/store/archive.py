"""A tensor and its metadata as `torch.save` lays them out, in parts: values are written from where they are.

    pickle, byte order, version, padding | values | directory, with padding

A zip archive of stored members (APPNOTE.TXT 6.3.10, sections 4.3 and 4.4) with torch's pickle (docs "Serialization
semantics"): `torch.load(weights_only=True)` reads it, memory-mapped or not, and so does every zip program. Values begin
at a page and the whole is a number of pages, so that one write can take it past the system's cache.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantexp.capture.store.direct import LEAST_BYTES, PAGE, aligned
from quantexp.model.safetensors import content_of

#: More has 64-bit sizes in a zip archive.
MOST_BYTES = (1 << 32) - (1 << 20)

#: The storages that torch's pickles name, by dtype.
_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}
_VALUES = b"archive/data/0"
_FEW = ((b"archive/byteorder", sys.byteorder.encode()), (b"archive/version", b"3\n"))
#: Signature, version wanted, flags (names in UTF-8), method, time, date | CRC-32, size, size, length of name, of extra
_LOCAL = struct.Struct("<4sHHHHH LLLHH")
#: Signature, version made by | as above | length of comment, disk, attributes inside, outside, place of local header
_ENTRY = struct.Struct("<4sH HHHHH LLLHH HHHLL")
#: Signature, disk, disk of the directory, entries here, in all | size and place of the directory, length of comment
_END = struct.Struct("<4sHHHH LLH")
_EXTRA = struct.Struct("<HH")
_VERSION, _UTF8 = 20, 1 << 11
#: 1980-01-01: the same values give the same bytes.
_DATE = 1 << 5 | 1
#: Of pickles: the last protocol that `weights_only` takes, and what a dict's items stand between.
_PROTOCOL = 2
_PROTO = pickle.PROTO + bytes([_PROTOCOL])
_BEGIN, _END_OF_PICKLE = _PROTO + pickle.EMPTY_DICT + pickle.MARK, pickle.SETITEMS + pickle.STOP
#: What padding is called; no program has registered it.
_PADDING = 0x4246


def takes(values: Tensor) -> bool:
    """Whether an archive of a tensor is made here; what is not is `torch.save`'s."""
    return values.dtype in _STORAGES and 0 < values.nbytes <= MOST_BYTES


def archive(values: Tensor, crc: int, metadata: Mapping[str, Any]) -> Sequence[memoryview]:
    """That of `{"tensor": values, "metadata": metadata}`, of a contiguous CPU tensor that `takes` names.

    `crc` is the CRC-32 of its bytes. What is written past the cache begins with pages, as far as the values do.
    """
    content = content_of(values)
    head, tail = _around(values, crc, metadata)
    if len(content) < LEAST_BYTES:
        return (memoryview(head + bytes(content) + tail),)
    whole = len(content) // PAGE * PAGE
    return _in_pages(head), content[:whole], _in_pages(bytes(content[whole:]) + tail)


def _around(values: Tensor, crc: int, metadata: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """What stands before the values, a number of pages, and what comes after them, up to the end of a page."""
    members, head = [], b""
    for name, content in ((b"archive/data.pkl", _pickled(values, metadata)), *_FEW):
        member = _Member(name, zlib.crc32(content), len(content), len(head))
        members.append(member)
        head += member.local() + content
    last = _Member(_VALUES, crc, values.nbytes, len(head))
    head += last.local(_padding(-(len(head) + len(last.local()))))
    entries = b"".join(member.entry() for member in members)
    start, count = len(head) + values.nbytes, len(members) + 1
    entries += last.entry(_padding(-(start + len(entries) + len(last.entry()) + _END.size)))
    return head, entries + _END.pack(b"PK\5\6", 0, 0, count, count, len(entries), start, 0)


def _padding(num_bytes: int) -> bytes:
    """An extra field of so many bytes, modulo pages, or of a page more where that is too little for one."""
    rest = (num_bytes - _EXTRA.size) % PAGE
    return _EXTRA.pack(_PADDING, rest) + bytes(rest)


def _in_pages(content: bytes) -> memoryview:
    """The same where a page begins."""
    memory: Any = aligned(len(content))
    memory[:] = np.frombuffer(content, np.uint8)
    return memoryview(memory)


@dataclass(frozen=True)
class _Member:
    """A file in the archive."""

    name: bytes
    crc: int
    num_bytes: int
    #: Where its local header is.
    place: int

    def local(self, extra: bytes = b"") -> bytes:
        return _LOCAL.pack(b"PK\3\4", *self._about(len(extra))) + self.name + extra

    def entry(self, extra: bytes = b"") -> bytes:
        about = self._about(len(extra))
        return _ENTRY.pack(b"PK\1\2", _VERSION, *about, 0, 0, 0, 0, self.place) + self.name + extra

    def _about(self, num_extra: int) -> tuple[int, ...]:
        sizes = self.crc, self.num_bytes, self.num_bytes, len(self.name), num_extra
        return _VERSION, _UTF8, 0, 0, _DATE, *sizes


def _pickled(values: Tensor, metadata: Mapping[str, Any]) -> bytes:
    """`{"tensor": values, "metadata": metadata}`: what is asked of a pickler by Python alone is asked once a shape."""
    named = _named(values.dtype, tuple(values.shape), values.stride())
    about = _body(pickle.dumps(dict(metadata), protocol=_PROTOCOL))
    return _BEGIN + _key("tensor") + named + _key("metadata") + about + _END_OF_PICKLE


def _body(pickled: bytes) -> bytes:
    """What a pickle says of its object: places that it remembers are its own, and are taken anew by the next."""
    return pickled.removeprefix(_PROTO).removesuffix(pickle.STOP)


def _key(name: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<L", len(name)) + name.encode()


@lru_cache(maxsize=1 << 12)
def _named(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """How a pickle names a contiguous tensor whose values stand in a member of the archive."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=_PROTOCOL).dump(_Named(dtype, shape, stride))
    return _body(stream.getvalue())


@dataclass(frozen=True)
class _Values:
    """The values in the pickle, which names them only."""

    name: tuple[object, ...]


@dataclass(frozen=True)
class _Named:
    """Pickled as torch pickles a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        hooks: OrderedDict[str, object] = OrderedDict()
        values = _Values(("storage", _STORAGES[self.dtype], "0", "cpu", math.prod(self.shape)))
        return torch._utils._rebuild_tensor_v2, (values, 0, self.shape, self.stride, False, hooks)


class _Pickler(pickle.Pickler):
    def persistent_id(self, item: Any) -> Any:
        return item.name if isinstance(item, _Values) else None
