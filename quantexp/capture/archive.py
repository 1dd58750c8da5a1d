"""A tensor and its metadata as `torch.save` lays them out, without the values: these are written where they belong.

    pickle, byte order, version, padding | values | directory
                  head                               tail

A zip archive of stored members (APPNOTE.TXT 6.3.10, sections 4.3 and 4.4) with torch's pickle (docs "Serialization
semantics"): `torch.load(weights_only=True)` reads it, memory-mapped or not, and so does every zip program. Values begin
at a page, so that they can be written without another copy.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantexp.capture.direct import PAGE

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
#: What padding is called; no program has registered it.
_PADDING = 0x4246


@dataclass(frozen=True)
class Archive:
    """What stands before and after the values; `head` is as long as a number of pages."""

    head: bytes
    tail: bytes


def takes(values: Tensor) -> bool:
    """Whether an archive of a tensor is made here; what is not is `torch.save`'s."""
    return values.dtype in _STORAGES and 0 < values.nbytes <= MOST_BYTES


def archive(values: Tensor, crc: int, metadata: Mapping[str, Any]) -> Archive:
    """That of `{"tensor": values, "metadata": metadata}`, of a contiguous CPU tensor that `takes` names.

    `crc` is the CRC-32 of its bytes.
    """
    members, head = [], b""
    for name, content in ((b"archive/data.pkl", _pickled(values, metadata)), *_FEW):
        member = _Member(name, zlib.crc32(content), len(content), len(head))
        members.append(member)
        head += member.local() + content
    member = _Member(_VALUES, crc, values.nbytes, len(head))
    padding = -(len(head) + len(member.local()) + _EXTRA.size) % PAGE
    head += member.local(_EXTRA.pack(_PADDING, padding) + b"\0" * padding)
    entries = b"".join(one.entry() for one in (*members, member))
    count, start = len(members) + 1, len(head) + values.nbytes
    end = _END.pack(b"PK\5\6", 0, 0, count, count, len(entries), start, 0)
    return Archive(head, entries + end)


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

    def entry(self) -> bytes:
        about = self._about(0)
        return _ENTRY.pack(b"PK\1\2", _VERSION, *about, 0, 0, 0, 0, self.place) + self.name

    def _about(self, num_extra: int) -> tuple[int, ...]:
        sizes = self.crc, self.num_bytes, self.num_bytes, len(self.name), num_extra
        return _VERSION, _UTF8, 0, 0, _DATE, *sizes


class _Values:
    """The values in the pickle, which names them only."""

    def __init__(self, values: Tensor) -> None:
        self.name = ("storage", _STORAGES[values.dtype], "0", "cpu", values.numel())


class _Pickler(pickle.Pickler):
    def persistent_id(self, item: Any) -> Any:
        return item.name if isinstance(item, _Values) else None


def _pickled(values: Tensor, metadata: Mapping[str, Any]) -> bytes:
    stream = io.BytesIO()
    pickler = _Pickler(stream, protocol=2)
    pickler.dispatch_table = {Tensor: _reduced}
    pickler.dump({"tensor": values, "metadata": dict(metadata)})
    return stream.getvalue()


def _reduced(values: Tensor) -> tuple[Any, ...]:
    hooks: OrderedDict[str, object] = OrderedDict()
    about = (0, tuple(values.shape), values.stride(), False, hooks)
    return torch._utils._rebuild_tensor_v2, (_Values(values), *about)
