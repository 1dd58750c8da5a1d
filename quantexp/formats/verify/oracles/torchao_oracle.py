"""torchao's reference of MX and NVFP4: codes and scales of whole blocks, rounded to nearest even.

Excluded, because torchao differs from the definitions there: blocks with NaN or Inf; scales of 2^-127, where it divides
by 2^-126; with the rule rceil an amax one ulp above max 2^k, which its division rounds down. For NVFP4: block scales
below 2^-6, E4M3's subnormals, which it does not use, and above E4M3's largest; elements within one rounding of a tie,
since it multiplies by a rounded reciprocal.
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

from quantexp.formats.verify.cases import middles
from quantexp.formats.verify.exact import Answer, Case, decoded
from quantexp.formats.verify.grids import code_values
from quantexp.formats.verify.oracles.oracle import Opinion, Oracle
from quantexp.formats.verify.rational import MX_ELEMENTS


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
        return _mx(case, gold)
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


def _mx(case: Case, gold: Answer) -> Opinion:
    rule = str(case.options.get("scale_rule", "floor"))
    x = case.x.astype(np.float32)
    good = np.isfinite(x).all(axis=1, keepdims=True)
    assert gold.block_scales is not None
    good &= gold.block_scales > 0
    if rule == "rceil":
        mantissa, _ = np.frexp(np.abs(np.where(good, x, 0)).max(axis=1, keepdims=True))
        largest, _ = np.frexp(np.float32(MX_ELEMENTS[case.fmt][3]))
        good &= mantissa != np.nextafter(np.float32(largest), np.float32(1))
    codes, scales = mx_codes(np.where(good, x, np.float32(1)), case.fmt, rule)
    answer = Answer(decoded(case.fmt, codes, scales, None), codes, scales)
    return Opinion(answer, np.broadcast_to(good, x.shape), good)


def _nv(case: Case, gold: Answer) -> Opinion:
    x, t = case.x.astype(np.float32), gold.tensor_scale
    assert gold.block_scales is not None
    assert t is not None
    good = np.isfinite(x).all(axis=1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):
        ratio = np.abs(np.where(good, x, 0)).max(axis=1, keepdims=True) / np.float32(6) / t
    good &= (ratio > 2.0**-6) & (ratio <= 448)
    codes, scales = nv_codes(np.where(good, x, t), t)
    d = code_values("e4m3")[gold.block_scales].astype(np.float64) * float(t)
    with np.errstate(invalid="ignore"):
        v = np.abs(x) / d
        off = np.abs(v[..., None] / middles("e2m1") - 1).min(axis=-1)
    answer = Answer(decoded(case.fmt, codes, scales, t), codes, scales, t)
    return Opinion(answer, good & (off >= 2.0**-22), good)
