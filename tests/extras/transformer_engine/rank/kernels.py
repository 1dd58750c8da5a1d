"""In place of Transformer Engine's kernels: casts into its own classes, and products of their values.

The casts of NVFP4 and of current scaling are Transformer Engine's reference quantizers in torch. Those of MXFP8 and of
blocks of 128 follow its kernels (common/cast and common/transpose of 2.11) by torch's own casts, with their scales of
NaN, Inf, zeros and the smallest values.
Padding is filled with bytes that stand for NaN, which a reader must leave out. Where Transformer Engine asks for it, an
amax is that of all ranks, as its kernels' is. `install()` serves the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quantexp.extras.transformer_engine.proof.stored import read

#: E8M0's and E4M3's NaN.
_GARBAGE = {torch.uint8: 0xFF, torch.float32: float("nan")}
#: The E8M0 bytes of a block of zeros, and of one with Inf.
_MXFP8_BYTES, _BLOCK_BYTES = (0, 254), (127, 127)
_updated: list[list[list[float]]] = []


def install() -> None:
    """Let te.Linear quantise and multiply."""
    import transformer_engine_torch as native

    _updated.clear()
    native.quantize = quantize
    native.generic_gemm = generic_gemm
    native.create_empty_quantized_tensor = empty_mxfp8
    native.fused_amax_and_scale_update_after_reduction = update_scales
    native.fp8_transpose = lambda data, dtype, out=None: data.flatten(0, -2).t().contiguous()
    native.swap_first_dims = swap_first_dims
    from transformer_engine.pytorch import distributed

    distributed.pad_columnwise_scale_inv = pad_columnwise


@contextlib.contextmanager
def scale_of_own_tokens() -> Iterator[None]:
    """A fault: a rank scales a tensor by its own part, though Transformer Engine asks for the amax of all."""
    import transformer_engine_torch as native

    def of_own_part(x: Tensor, quantizer: Any, *rest: Any) -> Any:
        reduces = getattr(quantizer, "with_amax_reduction", False)
        quantizer.with_amax_reduction = False
        result = quantize(x, quantizer, *rest)
        quantizer.with_amax_reduction = reduces
        return result

    native.quantize = of_own_part
    try:
        yield
    finally:
        native.quantize = quantize


def quantize(x: Tensor, quantizer: Any, out: Any = None, noop: Any = None) -> Any:
    """x in the copies that the quantizer is to make."""
    if out is None:
        out = quantizer.make_empty(x.shape, dtype=x.dtype, device=x.device)
    matrix = x.detach().reshape(-1, x.shape[-1])
    fill = {
        "MXFP8Quantizer": _mxfp8,
        "Float8CurrentScalingQuantizer": _fp8,
        "Float8Quantizer": _delayed,
        "Float8BlockQuantizer": _block,
        "NVFP4Quantizer": _nvfp4,
    }[type(quantizer).__name__]
    fill(out, matrix, quantizer)
    return out


def empty_mxfp8(quantizer: Any, shape: list[int], dtype: Any, device: Any, pinned: bool) -> Any:
    """What `make_empty` returned before version 2.18 left it to native code."""
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor

    K = shape[-1]
    M = torch.Size(shape).numel() // K

    def empty(*extents: int) -> Tensor:
        return torch.empty(extents, dtype=torch.uint8)

    return MXFP8Tensor(
        shape=shape,
        dtype=dtype,
        fp8_dtype=quantizer.dtype,
        rowwise_data=empty(*shape),
        rowwise_scale_inv=empty(-(-M // 128) * 128, -(-K // 128) * 4),
        columnwise_data=empty(*shape),
        columnwise_scale_inv=empty(-(-M // 128) * 4, -(-K // 128) * 128),
        quantizer=quantizer,
        with_gemm_swizzled_scales=quantizer.optimize_for_gemm,
    )


def swap_first_dims(x: Tensor, out: Tensor | None = None) -> Tensor:
    """What puts the gathered parts of transposed data side by side."""
    swapped = x.transpose(0, 1).contiguous()
    return swapped if out is None else out.copy_(swapped)


def pad_columnwise(scales: Tensor) -> Tensor:
    """Scales in multiples of 128 and 4, by a kernel of Triton's."""
    rows, columns = (-(-n // each) * each for n, each in zip(scales.shape, (128, 4), strict=True))
    return padded(scales, scales.new_empty(rows, columns))


def update_scales(
    amaxes: Tensor, histories: Any, scales: Any, algorithm: str, dtype: Any, margin: int
) -> None:
    """Delayed scaling: max / the largest of the history, whose rows then move by one, so that the next is the first."""
    assert (algorithm, margin) == ("max", 0)
    largest = {"kFloat8E4M3": 448.0, "kFloat8E5M2": 57344.0}[dtype.name]
    parts = amaxes.split([history.shape[1] for history in histories])
    for history, scale, own in zip(histories, scales, parts, strict=True):
        history[0] = own
        amax = history.amax(dim=0)
        scale.copy_(torch.where(amax > 0, largest / amax, scale))
        history.copy_(history.roll(-1, 0))
        history[0] = 0
    _updated.append([scale.tolist() for scale in scales])


def updated_scales() -> list[list[list[float]]]:
    """The scales of all modules after each update since `install`."""
    return _updated


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
        lines = x if axis == -1 else x.t()
        codes, scales = _in_blocks(lines, _element(quantizer), (1, 32), keeps_smallest())
        if axis == 0:
            codes, scales = codes.t(), scales.t()
        data.copy_(codes.reshape(data.shape))
        full = padded(scales, scale)
        if is_swizzled:
            full = swizzled(full) if axis == -1 else swizzled(full.t().contiguous())
        scale.copy_(full.reshape(scale.shape))


def keeps_smallest() -> bool:
    """Whether this version keeps MXFP8 blocks whose scale is 2^-127."""
    import transformer_engine

    major, minor = transformer_engine.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 13)


def _in_blocks(
    x: Tensor,
    element: str,
    block: tuple[int, int],
    keeps: bool = True,
    special: tuple[int, int] = _MXFP8_BYTES,
) -> tuple[Tensor, Tensor]:
    """Codes, and E8M0 bytes [row blocks, blocks]: the least power of two of at least amax / max, NaN left out."""
    dtype = torch.float8_e4m3fn if element == "e4m3" else torch.float8_e5m2
    top = torch.finfo(dtype).max
    M, K = x.shape
    blocks = x.double().reshape(M // block[0], block[0], K // block[1], block[1])
    amax = torch.where(blocks.isnan(), 0.0, blocks).abs().amax(dim=(1, 3))
    mantissa, exponent = torch.frexp(amax / top)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    of_zeros, of_inf = special
    scales = (exponent + 127).clamp(0, 254)
    scales = scales.masked_fill(amax == 0, of_zeros).masked_fill(amax.isinf(), of_inf)
    factor = torch.exp2(127.0 - scales.double())
    if not keeps:
        factor = factor.masked_fill(scales == 0, 1.0)
    scaled = (blocks * factor[:, None, :, None]).clamp(-top, top).float()
    return scaled.view(M, K).to(dtype).view(torch.uint8), scales.to(torch.uint8)


def _fp8(out: Any, x: Tensor, quantizer: Any) -> None:
    """By Transformer Engine's reference quantizer."""
    from transformer_engine.pytorch.custom_recipes.quantization_current_scaling import (
        CurrentScalingQuantizerRef,
    )

    dtype = torch.float8_e4m3fn if _element(quantizer) == "e4m3" else torch.float8_e5m2
    powers = quantizer.force_pow_2_scales
    reference = CurrentScalingQuantizerRef(dtype, pow_2_scales=powers)
    reference.with_amax_reduction = quantizer.with_amax_reduction
    reference.amax_reduction_group = quantizer.amax_reduction_group
    codes, scale_inv, _, _ = reference._quantize(x)
    codes = codes.view(torch.uint8)
    if out._data is not None:
        out._data.copy_(codes.view(out._data.shape))
    if out._transpose is not None:
        out._transpose.copy_(codes.t().reshape(out._transpose.shape))
        out._transpose_invalid = False
    out._scale_inv.copy_(scale_inv)


def _delayed(out: Any, x: Tensor, quantizer: Any) -> None:
    """Codes of x times the scale that there is; the amax is for the next one."""
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[_element(quantizer)]
    largest = torch.finfo(dtype).max
    codes = (x.float() * quantizer.scale).clamp(-largest, largest).to(dtype).view(torch.uint8)
    quantizer.amax.copy_(torch.maximum(quantizer.amax, x.abs().amax().float()))
    if out._data is not None:
        out._data.copy_(codes.view(out._data.shape))
    if out._transpose is not None:
        out._transpose.copy_(codes.t().reshape(out._transpose.shape))
        out._transpose_invalid = False
    out._scale_inv.copy_(quantizer.scale.reciprocal())


def _block(out: Any, x: Tensor, quantizer: Any) -> None:
    """In what lies compact, to be gathered, data are not transposed, and scales of rows are."""
    rows = 128 if quantizer.block_scaling_dim == 2 else 1
    is_compact = getattr(getattr(out, "_data_format", None), "name", "") == "COMPACT"
    for direction, axis in (("rowwise", -1), ("columnwise", 0)):
        data, scale = (getattr(out, f"_{direction}_{name}") for name in ("data", "scale_inv"))
        if data is None:
            continue
        lines = x if axis == -1 else x.t()
        M, K = lines.shape
        lines = torch.nn.functional.pad(lines, (0, -K % 128, 0, -M % rows))
        codes, scales = _in_blocks(lines, _element(quantizer), (rows, 128), special=_BLOCK_BYTES)
        codes = codes[:M, :K]
        data.copy_((codes.t() if is_compact and axis == 0 else codes).reshape(data.shape))
        values = torch.ldexp(torch.ones(()), scales.int() - 127)
        by_rows = rows > 1 or (is_compact and axis == -1)
        scale.copy_(padded(values if by_rows else values.t(), scale))


def _nvfp4(out: Any, x: Tensor, quantizer: Any) -> None:
    """By Transformer Engine's reference quantizer."""
    from transformer_engine.pytorch.custom_recipes import utils
    from transformer_engine.pytorch.custom_recipes.quantization_nvfp4 import NVFP4QuantizerRef

    is_swizzled = getattr(out, "_with_gemm_swizzled_scales", False)
    tile = (16, 16) if quantizer.with_2d_quantization else (1, 16)
    reference = NVFP4QuantizerRef(dtype=utils.Fp4Formats.E2M1, quant_tile_shape=tile)
    whole, own, own_pairs, own_blocks = _beside_others(x, quantizer)
    codes, scales, codes_t, scales_t, amax, amax_t = reference._quantize(whole)
    codes, scales, codes_t, scales_t = (
        codes[own],
        scales[own],
        codes_t[:, own_pairs],
        scales_t[:, own_blocks],
    )
    for direction, made in (
        ("rowwise", (codes, scales, amax)),
        ("columnwise", (codes_t, scales_t, amax_t)),
    ):
        data, scale = (getattr(out, f"_{direction}_{name}") for name in ("data", "scale_inv"))
        if data is None:
            continue
        data.copy_(made[0].view(data.shape))
        full = padded(made[1].view(torch.uint8), scale)
        scale.copy_(swizzled(full) if is_swizzled else full)
        getattr(out, f"_amax_{direction}").copy_(made[2])


def _beside_others(x: Tensor, quantizer: Any) -> tuple[Tensor, slice, slice, slice]:
    """The rows of all ranks that share an amax, and where this rank's rows, pairs and blocks of rows lie in them."""
    if not quantizer.with_amax_reduction:
        return x, slice(None), slice(None), slice(None)
    group, M = quantizer.amax_reduction_group, x.shape[0]
    parts = [torch.empty_like(x) for _ in range(group.size())]
    torch.distributed.all_gather(parts, x.contiguous(), group=group)
    first, last = group.rank() * M, (group.rank() + 1) * M
    own, pairs, blocks = (slice(first // each, last // each) for each in (1, 2, 16))
    return torch.cat(parts), own, pairs, blocks
