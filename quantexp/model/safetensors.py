"""Writes safetensors files: eight bytes with the header's length, the header in JSON, the values.

The safetensors library (0.8) writes only whole files, and makes them readable by their owner alone. Tests read these
files with it.

The format is that of https://github.com/huggingface/safetensors (README, "Format"): little-endian, values without gaps
in the order of their offsets, the header padded with spaces so that values begin at a multiple of eight bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantexp.compiled import address
from quantexp.folders import written_beside

if TYPE_CHECKING:
    from torch import Tensor

#: The format's names of dtypes, by torch's without `torch.`.
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def dtype_name(tensor: Tensor) -> str:
    """torch's name of a tensor's dtype, without `torch.`."""
    return str(tensor.dtype).removeprefix("torch.")


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    """A tensor's header entry; offsets count from the first byte of the values.

    Raises:
        KeyError: a dtype that the format does not support.
    """
    return {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}


def framed(header: Mapping[str, Any]) -> bytes:
    """The header preceded by its length, padded to a multiple of eight."""
    text = json.dumps(header, separators=(",", ":")).encode()
    padding = -len(text) % 8
    return (len(text) + padding).to_bytes(8, "little") + text + b" " * padding


def head_of(
    described: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, list[int]]]:
    """What precedes the values of tensors, given by dtype and shape, and each tensor's first byte and end in the file.

    Raises:
        KeyError: a dtype that the format does not support.
    """
    import torch

    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in described.items():
        start, end = end, end + math.prod(shape) * getattr(torch, dtype).itemsize
        header[name] = entry(dtype, list(shape), start, end)
    head = framed(header)
    places = {
        name: [len(head) + each for each in header[name]["data_offsets"]] for name in described
    }
    return head, places


def described(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, Sequence[int]]]:
    """Dtype and shape of each tensor, as `head_of` takes them."""
    return {name: (dtype_name(x), x.shape) for name, x in tensors.items()}


def content_of(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor's values, in the order of its indices; they keep the tensor alive.

    Raises:
        ValueError: a tensor on another device, or whose storage is smaller than its shape.
    """
    if not tensor.is_cpu:
        raise ValueError(f"values on {tensor.device}, to be read from the host's memory")
    raw: Any = np.asarray(_Bytes(tensor.contiguous().resolve_neg().resolve_conj()))
    return memoryview(raw)


class _Bytes:
    """A contiguous CPU tensor of any dtype in a form that numpy accepts.

    Uses numpy's array interface, version 3; torch's own conversions release the GIL at each step.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (tensor.nbytes,),
            "data": (address(tensor, tensor.numel(), tensor.dtype), False),
        }


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> dict[str, list[int]]:
    """Write named tensors and text metadata to one file, under a temporary name that is then renamed.

    Tensors on a device are copied to the host one at a time.

    Returns the first byte of each tensor's values in the file, and the one after the last.

    Raises:
        KeyError: a dtype that the format does not support.
        OSError: the file cannot be written.
    """
    head, places = head_of(described(tensors), metadata)
    with written_beside(path) as part, part.open("wb") as stream:
        stream.write(head)
        for tensor in tensors.values():
            stream.write(content_of(tensor.cpu()))
    return places
