"""The safetensors format, written: eight bytes with the header's length, the header in JSON, the values.

The format is that of https://github.com/huggingface/safetensors (README, "Format"): little-endian, values without gaps
in the order of their offsets, the header padded with spaces so that values begin at a multiple of eight bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write named tensors and text metadata to one file, beside its place, then renamed.

    Raises:
        KeyError: a dtype that the format has not.
        OSError: it cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                content: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
                stream.write(content)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
