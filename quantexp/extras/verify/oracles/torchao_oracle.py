"""torchao's reference of MX and NVFP4: codes and scales of whole blocks, rounded to nearest even.

Excluded is exactly what differs, by the operations of torchao 0.18.0. Whole blocks are excluded if their scale differs:

- blocks with Inf and no NaN, to which it gives a finite scale;
- with the rule rceil an amax just above max 2^k, whose float32 log2 rounds to the whole number k: never for |k| at most
  3, up to 39 float32 steps above 448 2^64, more steps the larger |k| is. The scale is then half of the right one;
- for NVFP4 a block scale that would be a subnormal of E4M3: it uses none below 2^-6.

Of other blocks those elements are excluded whose code differs:

- at the scale 2^-127 it divides by 2^-126, and with the rule rceil by 1, after which every element is zero;
- for NVFP4 it multiplies by a rounded reciprocal, which may move an element to the other side of a tie.

A block whose scale is NaN has no values, so its codes count as zeros, as the definitions write them.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantexp.extras.verify.exact import KINDS, Answer, Case, decoded
from quantexp.extras.verify.grids import code_values, nearest
from quantexp.extras.verify.oracles.oracle import Opinion, Oracle
from quantexp.extras.verify.rational import MX_ELEMENTS
from quantexp.extras.verify.tally import differing


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the messages that torchao prints on import about extensions it does not need here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


with _quiet():
    from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.kernels import pack_uint4

Array = NDArray[Any]

TYPES = {
    "mxfp8_e4m3": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp6_e2m3": mx_tensor.DTYPE_FP6_E2M3,
    "mxfp6_e3m2": mx_tensor.DTYPE_FP6_E3M2,
    "mxfp4_e2m1": torch.float4_e2m1fn_x2,
}


def oracle() -> Oracle:
    """The installed version."""
    mx_codes(np.ones((1, 32), np.float32), "mxfp4_e2m1", "rceil")
    nv_codes(np.ones((1, 16), np.float32), np.float32(1))
    return Oracle("torchao", version("torchao"), blocks=blocks)


def blocks(case: Case, gold: Answer) -> Opinion | None:
    """Its codes and scales of float32 blocks along the last axis, and their values."""
    if case.dtype != "float32" or case.rounding != "even" or case.x.ndim != 2:
        return None
    if case.axis != -1 or case.strided or case.packed or case.options.get("pre_scale"):
        return None
    if case.fmt in TYPES and case.x.shape[1] == 32 == case.block:
        return _mx(case)
    if case.fmt == "nvfp4_e2m1" and case.x.shape[1] == 16 == case.block:
        return _nv(case, gold)
    return None


def mx_codes(x: Array, name: str, rule: str) -> tuple[Array, Array]:
    """Codes, one per byte, and scales of blocks of 32 along the last axis."""
    mode = ScaleCalculationMode(rule)
    scales, codes = mx_tensor.to_mx(torch.from_numpy(x.copy()), TYPES[name], 32, mode)
    codes = codes.view(torch.uint8).numpy()
    if name == "mxfp4_e2m1":
        codes = _unpacked(codes)
    return codes.reshape(x.shape), scales.view(torch.uint8).numpy().reshape(x.shape[0], -1)


def nv_codes(x: Array, t: np.float32) -> tuple[Array, Array]:
    """Codes, one per byte, and block scales of blocks of 16 along the last axis, under the tensor scale t."""
    scale = torch.tensor(float(t))
    scales, packed = nvfp4_tensor.nvfp4_quantize(torch.from_numpy(x.copy()), 16, scale)
    codes = _unpacked(packed.view(torch.uint8).numpy()).reshape(x.shape)
    return codes, scales.view(torch.uint8).numpy().reshape(x.shape[0], -1)


def packed(codes: Array) -> Array:
    """Two four-bit codes per byte, along the last axis."""
    return np.asarray(pack_uint4(torch.from_numpy(codes.copy())).numpy())


def _unpacked(codes: Array) -> Array:
    return np.stack([codes & 0xF, codes >> 4], axis=-1)


def _mx(case: Case) -> Opinion:
    rule = str(case.options.get("scale_rule", "floor"))
    x = case.x.astype(np.float32)
    codes, scales = mx_codes(x, case.fmt, rule)
    amax = np.abs(x).max(axis=1, keepdims=True)
    good = ~np.isinf(amax)
    if rule == "rceil":
        good &= ~_halves(amax, float(MX_ELEMENTS[case.fmt][3]))
    with np.errstate(invalid="ignore"):
        v = np.ldexp(np.abs(x).astype(np.float64), 127)
    at_smallest = scales == 0
    theirs = 0.0 if rule == "rceil" else v / 2
    return _opinion(case, codes, scales, None, good, ~at_smallest | _same_side(case.fmt, v, theirs))


def _halves(amax: Array, largest: float) -> Array:
    """Whether torchao's rceil gives half of the right scale: the block's largest value is above what it can hold."""
    with np.errstate(divide="ignore"):
        log = np.log2((amax / np.float32(largest)).astype(np.float64)).astype(np.float32)
    exponent = np.clip(np.ceil(np.where(np.isfinite(log), log, -127)), -127, 127).astype(np.int64)
    return np.isfinite(amax) & (np.ldexp(largest, exponent) < amax)


def _nv(case: Case, gold: Answer) -> Opinion:
    x, t = case.x.astype(np.float32), gold.tensor_scale
    assert t is not None
    codes, scales = nv_codes(x, t)
    amax = np.abs(x).max(axis=1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):
        # Half of a step below 2^-6; a ratio there rounds to 2^-6.
        good = ~np.isinf(amax) & ~(amax / np.float32(6) / t < 7.5 * 2.0**-9)
        b = code_values("e4m3")[scales]
        v, theirs = np.abs(x) / (b * t), np.abs(x) * (np.float32(1) / t / b)
    return _opinion(case, codes, scales, t, good, _same_side(case.fmt, v, theirs))


def _same_side(name: str, v: Array, other: Array | float) -> Array:
    """Whether elements and what torchao has in their place, in units of the scale, have the same code; NaN has."""
    v, other = np.broadcast_arrays(v.astype(np.float64), np.float64(other))
    element = KINDS[name][1]
    return ~differing(nearest(element, v, True), nearest(element, other, True))


def _opinion(
    case: Case,
    codes: Array,
    scales: Array,
    t: np.float32 | None,
    good: Array,
    same: Array,
) -> Opinion:
    """Its result, known in blocks that are good and there in elements that have the same code."""
    nan = 0xFF if t is None else 0x7F
    codes = np.where(scales == nan, 0, codes).astype(np.uint8)
    answer = Answer(decoded(case.fmt, codes, scales, t), codes, scales, t)
    return Opinion(answer, good & (same | (scales == nan)), good)
