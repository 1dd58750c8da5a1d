"""In place of Transformer Engine's kernels: casts by our `encode` into its own classes, and products of their values.

Padding is filled with bytes that stand for NaN, which a reader must leave out. `install()` serves the process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantexp.formats import encode
from quantexp.proof.transformer_engine.stored import read

#: E8M0's and E4M3's NaN.
_GARBAGE = {torch.uint8: 0xFF, torch.float32: float("nan")}


def install() -> None:
    """Let te.Linear quantise and multiply."""
    import transformer_engine_torch as native

    native.quantize = quantize
    native.generic_gemm = generic_gemm
    native.fp8_transpose = lambda data, dtype, out=None: data.flatten(0, -2).t().contiguous()


def quantize(x: Tensor, quantizer: Any, out: Any = None, noop: Any = None) -> Any:
    """x in the copies that the quantizer is to make."""
    if out is None:
        out = quantizer.make_empty(x.shape, dtype=x.dtype, device=x.device)
    matrix = x.detach().reshape(-1, x.shape[-1])
    fill = {
        "MXFP8Quantizer": _mxfp8,
        "Float8CurrentScalingQuantizer": _fp8,
        "Float8BlockQuantizer": _block,
        "NVFP4Quantizer": _nvfp4,
    }[type(quantizer).__name__]
    fill(out, matrix, quantizer)
    return out


def generic_gemm(A: Any, transa: bool, B: Any, transb: bool, *rest: Any, **options: Any) -> Any:
    """The product of what both operands stand for, rounded once."""
    left, right = values(B, 0 if transb else -1), values(A, -1 if transa else 0)
    product = (left.t() if transb else left) @ (right.t() if transa else right)
    shape = (*B.shape[:-1], product.shape[-1]) if not transb else product.shape
    return product.reshape(shape).to(torch.bfloat16), None, None, None


def values(x: Any, axis: int) -> Tensor:
    """What the copy along an axis stands for, float32."""
    stored = read(x, axis)
    return x.detach().reshape(-1, x.shape[-1]).float() if stored is None else stored.values()


def swizzled(scales: Tensor) -> Tensor:
    """Scales, padded to 128 and 4, in cuBLAS's order."""
    rows, columns = scales.shape
    tiles = scales.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(rows, columns)


def padded(scales: Tensor, like: Tensor) -> Tensor:
    """Scales in a larger tensor's corner, with garbage beside them."""
    full = torch.full_like(like, _GARBAGE[like.dtype])
    full[: scales.shape[0], : scales.shape[1]] = scales
    return full


def _element(quantizer: Any) -> str:
    return {"kFloat8E4M3": "e4m3", "kFloat8E5M2": "e5m2"}[quantizer.dtype.name]


def _mxfp8(out: Any, x: Tensor, quantizer: Any) -> None:
    is_swizzled = getattr(out, "_with_gemm_swizzled_scales", False)
    for direction, axis in (("rowwise", -1), ("columnwise", 0)):
        data, scale = (getattr(out, f"_{direction}_{name}") for name in ("data", "scale_inv"))
        if data is None:
            continue
        codes, scales = encode(x, f"mxfp8_{_element(quantizer)}", axis=axis, scale_rule="rceil")
        data.copy_(codes.view(data.shape))
        full = padded(scales, scale)  # type: ignore[arg-type]
        if is_swizzled:
            full = swizzled(full) if axis == -1 else swizzled(full.t().contiguous())
        scale.copy_(full.reshape(scale.shape))


def _fp8(out: Any, x: Tensor, quantizer: Any) -> None:
    scaling = "current" if quantizer.force_pow_2_scales else "exact"
    codes, scale = encode(x, f"fp8_{_element(quantizer)}", scaling=scaling)
    if out._data is not None:
        out._data.copy_(codes.view(out._data.shape))
    if out._transpose is not None:
        out._transpose.copy_(codes.t().reshape(out._transpose.shape))
        out._transpose_invalid = False
    out._scale_inv.copy_(scale.reciprocal())


def _block(out: Any, x: Tensor, quantizer: Any) -> None:
    assert quantizer.block_scaling_dim == 1, "blocks of two dimensions have no encode"
    for direction, axis in (("rowwise", -1), ("columnwise", 0)):
        data, scale = (getattr(out, f"_{direction}_{name}") for name in ("data", "scale_inv"))
        if data is None:
            continue
        name = f"mxfp8_{_element(quantizer)}"
        codes, scales = encode(x, name, axis=axis, block=128, scale_rule="rceil")
        values = torch.ldexp(torch.ones(()), scales.int() - 127)
        data.copy_(codes if axis == -1 else codes.t())
        scale.copy_(padded(values.t() if axis == -1 else values, scale))


def _nvfp4(out: Any, x: Tensor, quantizer: Any) -> None:
    is_swizzled = getattr(out, "_with_gemm_swizzled_scales", False)
    for direction, lines in (("rowwise", x), ("columnwise", x.t())):
        data, scale = (getattr(out, f"_{direction}_{name}") for name in ("data", "scale_inv"))
        if data is None:
            continue
        codes, scales = encode(lines.contiguous(), "nvfp4", packed=True)
        data.copy_(codes.view(data.shape))
        full = padded(scales.block, scale)
        scale.copy_(swizzled(full) if is_swizzled else full)
        getattr(out, f"_amax_{direction}").copy_(x.abs().amax().float())
