"""Every code of a format: decoded at every scale, and encoded again from its value."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantexp.extras.verify.exact import KINDS, decoded, to_dtype
from quantexp.extras.verify.gold_check import GOLD
from quantexp.extras.verify.grids import code_values, grid
from quantexp.extras.verify.kernels import Kernel, to_numpy, to_torch
from quantexp.extras.verify.oracles.oracle import Oracle
from quantexp.extras.verify.questions import DTYPES
from quantexp.extras.verify.tally import Tally

Array = NDArray[Any]

#: Scales of the whole tensor, including both ends of their range.
TENSOR_SCALES = {
    "nv": (1.0, 0.37, 2.0**-117, 2.0**100),
    "flat": (1.0, 0.37, 2.0**-126, 2.0**127),
}


def decode_every_code(
    fmt: str,
    kernel: Kernel,
    device: str,
    label: str,
    oracles: list[Oracle],
    tally: Tally,
) -> None:
    """Decode all codes at all block scales, including NaN's, under several tensor scales."""
    kind, element = KINDS[fmt]
    num_codes = 2 * grid(element).sign_bit
    num_scales = {"mx": 256, "nv": 128, "flat": 1}[kind]
    codes, scales = (
        a.astype(np.uint8) for a in np.meshgrid(np.arange(num_codes), np.arange(num_scales))
    )
    for tensor_scale in TENSOR_SCALES.get(kind, (None,)):
        t = None if tensor_scale is None else np.float32(tensor_scale)
        block_scales = None if kind == "flat" else scales
        description = f"every code at every scale{'' if t is None else f', tensor scale {t:g}'}"
        by_gold = decoded(fmt, codes, block_scales, t)
        for dtype in DTYPES:
            got = _decode(kernel, device, fmt, codes, block_scales, t, dtype)
            where = (fmt, label, GOLD)
            tally.add(
                where, "decode", to_dtype(by_gold, dtype), got, description=f"{dtype} {description}"
            )
            if dtype == "float32":
                _against_oracles(
                    fmt, codes, block_scales, t, got, label, oracles, tally, description
                )
    if KINDS[fmt][1] == "e2m1":
        _decode_every_byte(fmt, kernel, device, (fmt, label, GOLD), tally)


def _against_oracles(
    fmt: str,
    codes: Array,
    block_scales: Array | None,
    t: np.float32 | None,
    got: Array,
    label: str,
    oracles: list[Oracle],
    tally: Tally,
    description: str,
) -> None:
    for oracle in oracles:
        values = oracle.code_values(KINDS[fmt][1])
        if values is None:
            continue
        theirs = decoded(fmt, codes, block_scales, t, values, oracle.code_values("e4m3"))
        tally.add((fmt, label, oracle.name), "decode", theirs, got, description=description)


def _decode(
    kernel: Kernel,
    device: str,
    fmt: str,
    codes: Array,
    block_scales: Array | None,
    t: np.float32 | None,
    dtype: str,
) -> Array:
    tensor = None if t is None else torch.tensor(float(t), dtype=torch.float32, device=device)
    block = None if block_scales is None else to_torch(block_scales, "uint8", device)
    scales = tensor if block is None else block if tensor is None else (block, tensor)
    keywords = {} if block is None else {"block": 1}
    assert kernel.decode is not None
    y = kernel.decode(
        to_torch(codes, "uint8", device), scales, fmt, dtype=getattr(torch, dtype), **keywords
    )
    return to_numpy(y)


def _decode_every_byte(
    fmt: str, kernel: Kernel, device: str, where: tuple[str, str, str], tally: Tally
) -> None:
    """Two codes per byte, in all 256 combinations, at a scale of 1."""
    bytes_ = np.arange(256, dtype=np.uint8).reshape(32, 8)
    codes = np.stack([bytes_ & 0xF, bytes_ >> 4], axis=-1).reshape(32, 16)
    unit = 127 if KINDS[fmt][0] == "mx" else 0x38
    block = to_torch(np.full((32, 1), unit, np.uint8), "uint8", device)
    scales = block if KINDS[fmt][0] == "mx" else (block, torch.ones((), device=device))
    assert kernel.decode is not None
    got = kernel.decode(to_torch(bytes_, "uint8", device), scales, fmt, block=16, packed=True)
    tally.add(where, "decode", code_values("e2m1")[codes], to_numpy(got), description="every byte")


def encode_every_code(
    fmt: str, kernel: Kernel, device: str, where: tuple[str, str, str], tally: Tally
) -> None:
    """Encode the value of every code; in blocks, next to the largest value, which determines the scale."""
    kind, element = KINDS[fmt]
    values = code_values(element)
    codes = np.arange(len(values), dtype=np.uint8)
    if kind == "flat":
        # All codes of NaN encode to one; HiFloat8 has no other.
        expected = np.where(np.isnan(values), 0x80 if fmt == "hifp8" else 0x7F, codes)
        x = to_torch(values, "float32", device)
        assert kernel.encode is not None
        got, _ = kernel.encode(x, fmt, scaling="none", saturate=False)
        tally.add(
            where, "encode", expected.astype(np.uint8), to_numpy(got), description="every code"
        )
        return
    finite = np.isfinite(values)
    largest = grid(element).magnitudes[-1]
    beside = np.stack([values[finite], np.full(finite.sum(), largest)], axis=1)
    scales = np.arange(-100, 101, 10) if kind == "mx" else np.arange(1, 0x7F)
    powers = np.exp2(scales.astype(float)) if kind == "mx" else code_values("e4m3")[scales]
    x = to_torch((beside[None] * powers[:, None, None]).astype(np.float32), "float32", device)
    keywords = {} if kind == "mx" else {"scaling": "none"}
    assert kernel.encode is not None
    got, scales_got = kernel.encode(x, fmt, block=2, **keywords)
    block_scales = to_numpy(scales_got if kind == "mx" else scales_got[0])
    shape = (len(scales), int(finite.sum()))
    expected = np.broadcast_to(codes[finite], shape)
    tally.add(where, "encode", expected, to_numpy(got)[..., 0], description="every code")
    stored = np.broadcast_to((scales + 127 if kind == "mx" else scales)[:, None], shape)
    tally.add(
        where, "scales", stored.astype(np.uint8), block_scales[..., 0], description="every code"
    )
