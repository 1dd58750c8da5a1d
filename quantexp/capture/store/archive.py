"""A tensor and its metadata in the layout of `torch.save`, as parts, so that values are written without a copy.

    pickle, byte order, version, padding | values | directory, with padding

A zip archive of stored members (APPNOTE.TXT 6.3.10, sections 4.3 and 4.4) with torch's pickle (docs "Serialization
semantics"): `torch.load(weights_only=True)` reads it, memory-mapped or not, and so does every zip program. Values are
page-aligned and the file is a whole number of pages, so that one write can bypass the page cache.
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

#: Larger archives need 64-bit sizes in the zip format.
MOST_BYTES = (1 << 32) - (1 << 20)

#: dtype -> the storage class in torch's pickles.
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
#: 1980-01-01, so that the same values give the same bytes.
_DATE = 1 << 5 | 1
#: Pickle: the highest protocol that `weights_only` accepts, and the marks around a dict's items.
_PROTOCOL = 2
_PROTO = pickle.PROTO + bytes([_PROTOCOL])
_BEGIN, _END_OF_PICKLE = _PROTO + pickle.EMPTY_DICT + pickle.MARK, pickle.SETITEMS + pickle.STOP
#: The id of the padding's extra field, which no program has registered.
_PADDING = 0x4246


def takes(values: Tensor) -> bool:
    """Whether this module supports a tensor; others use `torch.save`."""
    return values.dtype in _STORAGES and 0 < values.nbytes <= MOST_BYTES


def archive(values: Tensor, crc: int, metadata: Mapping[str, Any]) -> Sequence[memoryview]:
    """The archive of `{"tensor": values, "metadata": metadata}`, for a contiguous CPU tensor that `takes` supports.

    `crc` is the CRC-32 of its bytes. All parts are page-aligned if the values are.
    """
    content = content_of(values)
    head, tail = _around(values, crc, metadata)
    if len(content) < LEAST_BYTES:
        return (memoryview(head + bytes(content) + tail),)
    whole = len(content) // PAGE * PAGE
    return _in_pages(head), content[:whole], _in_pages(bytes(content[whole:]) + tail)


def _around(values: Tensor, crc: int, metadata: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """The bytes before the values, a whole number of pages, and the bytes after them, up to a page boundary."""
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
    """An extra field of this many bytes modulo a page, one page longer if that is too short for a field."""
    rest = (num_bytes - _EXTRA.size) % PAGE
    return _EXTRA.pack(_PADDING, rest) + bytes(rest)


def _in_pages(content: bytes) -> memoryview:
    """A page-aligned copy."""
    memory: Any = aligned(len(content))
    memory[:] = np.frombuffer(content, np.uint8)
    return memoryview(memory)


@dataclass(frozen=True)
class _Member:
    """A file in the archive."""

    name: bytes
    crc: int
    num_bytes: int
    #: The offset of its local header.
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
    """The pickle of `{"tensor": values, "metadata": metadata}`; the tensor's part is cached by shape."""
    named = _named(values.dtype, tuple(values.shape), values.stride())
    about = _body(pickle.dumps(dict(metadata), protocol=_PROTOCOL))
    return _BEGIN + _key("tensor") + named + _key("metadata") + about + _END_OF_PICKLE


def _body(pickled: bytes) -> bytes:
    """The part of a pickle that builds its object, without memo entries, which the next pickle would overwrite."""
    return pickled.removeprefix(_PROTO).removesuffix(pickle.STOP)


def _key(name: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<L", len(name)) + name.encode()


@lru_cache(maxsize=1 << 12)
def _named(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """The pickle of a contiguous tensor whose values are a member of the archive."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=_PROTOCOL).dump(_Named(dtype, shape, stride))
    return _body(stream.getvalue())


@dataclass(frozen=True)
class _Values:
    """Stands for the values in the pickle, which only refers to them."""

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
