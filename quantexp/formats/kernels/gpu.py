"""Triton kernels for NVIDIA GPUs: what they claim, and how they are called.

They are bit-identical to the torch code for what `cpu.c` rounds, if the sides of blocks are powers of two: bfloat16,
float16 and float32; to nearest or at random; after a Hadamard transform or not; including short last blocks, NaN and
Inf, signed zeros and subnormals. MX in blocks of 32 and HiF8, to nearest, have kernels of their own (`triton_mx`,
`triton_hif8`), all else that of `triton_panels`. Each element is read once and written once, a tensor scale is read on
the device, and nothing synchronises with the device.

(v + C) - C must remain two roundings, for which there are two safeguards: contraction is off at launch
(`enable_fp_fusion`), and Triton emits additions with explicit rounding (`add.rn`), which the assembler must not
contract. It emits no `.ftz`, so subnormals are kept. Triton is imported with the first tensor; it comes with torch's
CUDA builds.
"""

from __future__ import annotations

from functools import cache
from subprocess import SubprocessError
from typing import Any

import torch
from torch import Tensor

from quantexp.formats.kernels import cpu
from quantexp.formats.kernels.gpu_panels import (
    LAUNCHES,
    on,
    power_of_two_from,
    quantise_panels,
    raise_to_amax_of_transform,
)
from quantexp.formats.layout import INPUT_DTYPES, Draw, Transform, outer_axis_inner
from quantexp.formats.rounding import can_saturate, rule_offset
from quantexp.formats.spec import QuantSpec, resolve
from quantexp.formats.table import MX_BLOCK, is_compiled, is_usual_mx
from quantexp.formats.types import Element, Family, Rounding, ScaleRule, Scaling

#: Format families with kernels.
FAMILIES = cpu.FAMILIES
#: The first compute capability whose maximum instructions propagate NaN.
_LEAST_CAPABILITY = (8, 0)
#: The first Triton version whose `div_rn` keeps subnormals.
_LEAST_TRITON = (3, 6)
#: CUDA's limit on the second and third extent of a grid.
_GRID_LIMIT = 65535
#: The largest block of which a tile holds both a column and a row.
_MAX_BLOCK_OF_BOTH = 128


def reads(x: Tensor) -> bool:
    """Whether the kernels accept such a tensor, with any strides."""
    is_plain = type(x) in (Tensor, torch.nn.Parameter) and x.dtype in INPUT_DTYPES
    return is_plain and x.is_cuda and obstacle(x.device) is None


def claims(x: Tensor, spec: QuantSpec, transform: Transform | None = None) -> bool:
    """Whether `quantise` is exact for such a tensor, after a transform if there is one."""
    if not claims_spec(spec) or not reads(x):
        return False
    if spec.rounding is Rounding.STOCHASTIC and not x.is_contiguous():
        return False  # numbers follow the order of indices
    if spec.fmt.across > 1 and (x.ndim not in (1, 2) or not x.numel()):
        return False
    return transform is None or cpu.fits_transform(x, spec, transform)


def claims_both(x: Tensor, spec: QuantSpec) -> bool:
    """Whether `quantise_both` is."""
    is_blocked = spec.fmt.block is not None and spec.fmt.across == 1
    is_small = is_blocked and spec.block <= _MAX_BLOCK_OF_BOTH
    return is_small and spec.rounding is not Rounding.STOCHASTIC and claims(x, spec)


def claims_spec(spec: QuantSpec) -> bool:
    """Whether a kernel exists for this specification, on a supported device."""
    if spec.fmt.block is not None and any(n & (n - 1) for n in (spec.block, spec.fmt.across)):
        return False
    if spec.rounding is Rounding.ZERO:
        return False
    return is_compiled(spec.fmt, spec.block)


def has_own_kernel(spec: QuantSpec) -> bool:
    """Whether the kernel is not that of `triton_panels`: MX in blocks of 32 and HiF8, rounded to nearest."""
    if not spec.rounding.is_to_nearest or spec.is_pre_scaled:
        return False
    if spec.fmt.family is Family.MX:
        return spec.block == MX_BLOCK and is_usual_mx(spec.fmt.element)
    return spec.fmt.family is Family.HIF8


@cache
def obstacle(device: torch.device) -> str | None:
    """The reason why there are no kernels on this CUDA device; None if there are."""
    if torch.version.hip is not None:
        return "the kernels are not checked on AMD GPUs"
    if (capability := torch.cuda.get_device_capability(device)) < _LEAST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < _LEAST_TRITON:
        return f"Triton {triton.__version__} is older than 3.6: its divisions flush subnormals"
    return _refusal(device)


def _refusal(device: torch.device) -> str | None:
    """The reason why Triton cannot compile a kernel, such as a missing C compiler; None if it compiles one."""
    from triton import TritonError

    x = torch.zeros(MX_BLOCK, dtype=torch.bfloat16, device=device)
    try:
        quantise(x, x, resolve("hifp8"), 0, None)
    except (TritonError, RuntimeError, OSError, ImportError, SubprocessError) as error:
        return f"Triton does not compile: {(str(error).strip().splitlines() or [repr(error)])[0]}"
    return None


def quantise(
    x: Tensor,
    y: Tensor,
    spec: QuantSpec,
    axis: int,
    scale: Tensor | None,
    draw: Draw | None = None,
    transform: Transform | None = None,
) -> None:
    """Write the quantised x to y, which may be x itself.

    Both are contiguous, of one shape, dtype and device; blocks lie along `axis`, counted from the front. `scale` is the
    tensor scale (see `tensor_scale`), on the same device, or None if the specification has none.
    """
    if x.numel() == 0:
        return
    if transform is not None or not has_own_kernel(spec):
        quantise_panels(x, y, None, spec, axis, scale, draw, transform)
        return
    if spec.fmt.family is Family.HIF8:
        _hif8(x, y, spec, scale)
        return
    outer, along, inner = outer_axis_inner(x.shape, axis)
    if inner > 1:
        _mx_tiles(x, None, y, (outer, along, 1, inner), spec)
    elif along % MX_BLOCK:
        _mx_tiles(x, y, None, (1, outer, 1, along), spec)
    else:
        _mx_flat(x, y, spec)


def quantise_both(
    x: Tensor,
    columns: Tensor,
    rows: Tensor,
    spec: QuantSpec,
    axis: int,
    scale: Tensor | None = None,
) -> None:
    """Write x quantised in blocks along `axis` to `columns` and along its last axis to `rows`, from one read.

    All are contiguous, of one shape, dtype and device; `axis`, counted from the front, is not the last. One of the two
    may be x. `scale` is as in `quantise`.
    """
    if x.numel() == 0:
        return
    if not has_own_kernel(spec):
        quantise_panels(x, columns, rows, spec, axis, scale, None, None)
        return
    outer, along, inner = outer_axis_inner(x.shape, axis)
    last = x.shape[-1]
    if last % MX_BLOCK == 0:
        last = inner
    _mx_tiles(x, rows, columns, (outer, along, inner // last, last), spec)


def finite_amax(x: Tensor, axis: int = 0, transform: Transform | None = None) -> Tensor:
    """The largest magnitude among the finite elements of the contiguous x, 0-dim float32; 0 if there are none.

    With a transform along `axis`, it is that of the transform of x.
    """
    amax_bits = torch.zeros((), dtype=torch.int32, device=x.device)
    if x.numel() > 0:
        if transform is None:
            _raise_to_amax(x, amax_bits)
        else:
            raise_to_amax_of_transform(x, amax_bits, axis, transform)
    return amax_bits.view(torch.float32)


def _raise_to_amax(x: Tensor, amax_bits: Tensor) -> None:
    from quantexp.formats.kernels.triton_amax import amax_flat

    (words,), is_pairs = _words((x,), x.numel())
    launch = LAUNCHES["amax_flat", is_pairs]
    size = launch.blocks * MX_BLOCK // (2 if is_pairs else 1)
    with on(x):
        amax_flat[(-(-words.numel() // size),)](
            words,
            amax_bits,
            words.numel(),
            SIZE=size,
            IS_PAIRS=is_pairs,
            num_warps=launch.num_warps,
        )


def _mx_flat(x: Tensor, y: Tensor, spec: QuantSpec) -> None:
    from quantexp.formats.kernels.triton_mx import mx_flat

    (words, to), is_pairs = _words((x, y), x.numel())
    launch = LAUNCHES["mx_flat", is_pairs]
    blocks = x.numel() // MX_BLOCK
    grid = (-(-blocks // launch.blocks),)
    with on(x):
        mx_flat[grid](
            words,
            to,
            blocks,
            BLOCKS=launch.blocks,
            IS_PAIRS=is_pairs,
            num_warps=launch.num_warps,
            **_mx_constants(spec),
        )


def _mx_tiles(
    x: Tensor,
    rows: Tensor | None,
    columns: Tensor | None,
    extents: tuple[int, int, int, int],
    spec: QuantSpec,
) -> None:
    """Tiles of x as [O, N, M, L]: blocks along L go to `rows`, blocks along N to `columns`.

    One launch, unless the extents exceed the grid's limits.
    """
    num_outer, along, middle, last = extents
    tensors = (x, x if rows is None else rows, x if columns is None else columns)
    flat, is_pairs = _words(tensors, last)
    last = last // 2 if is_pairs else last
    words = [tensor.view(num_outer, along, middle * last) for tensor in flat]
    constants = {
        "HAS_ROWS": rows is not None,
        "HAS_COLUMNS": columns is not None,
        "IS_PAIRS": is_pairs,
        **_mx_constants(spec),
    }
    step = _GRID_LIMIT * MX_BLOCK
    step_outer = _GRID_LIMIT if along <= step else 1
    with on(x):
        for o in range(0, num_outer, step_outer):
            for n in range(0, along, step):
                parts = [part[o : o + step_outer, n : n + step] for part in words]
                _launch_tiles(parts, middle, last, constants)


def _launch_tiles(
    words: list[Tensor], middle: int, last: int, constants: dict[str, object]
) -> None:
    from quantexp.formats.kernels.triton_mx import mx_tile

    num_outer, along, _ = words[0].shape
    is_pairs = bool(constants["IS_PAIRS"])
    launch = LAUNCHES["mx_tile", is_pairs]
    block_words = MX_BLOCK // 2 if is_pairs else MX_BLOCK
    groups = min(launch.blocks, power_of_two_from(-(-last // block_words)))
    tiles = -(-last // (groups * block_words))
    mx_tile[tiles * middle, -(-along // MX_BLOCK), num_outer](
        *words,
        along,
        middle,
        last,
        GROUPS=groups,
        HAS_MIDDLE=middle > 1,
        num_warps=launch.num_warps,
        **constants,
    )


def _hif8(x: Tensor, y: Tensor, spec: QuantSpec, scale: Tensor | None) -> None:
    from quantexp.formats.kernels.triton_hif8 import hif8_flat

    is_power = spec.scaling is not Scaling.EXACT
    (words, to), is_pairs = _words((x, y), x.numel() if is_power else 1)
    launch = LAUNCHES["hif8_flat", is_pairs]
    size = launch.blocks * MX_BLOCK // (2 if is_pairs else 1)
    with on(x):
        hif8_flat[(-(-words.numel() // size),)](
            words,
            to,
            scale,
            words.numel(),
            SIZE=size,
            IS_PAIRS=is_pairs,
            HAS_SCALE=scale is not None,
            IS_POWER=is_power,
            IS_AWAY=spec.rounding is Rounding.AWAY,
            SATURATES=spec.saturate,
            num_warps=launch.num_warps,
            enable_fp_fusion=False,
        )


def _words(tensors: tuple[Tensor, ...], extent: int) -> tuple[list[Tensor], bool]:
    """The flattened tensors as the kernels read them (see `triton_words`), and whether in pairs.

    Pairs need an even extent, so that no pair spans two rows, and addresses that are multiples of four.
    """
    flat = [tensor.view(-1) for tensor in tensors]
    if flat[0].dtype != torch.bfloat16:
        return flat, False
    is_pairs = extent % 2 == 0 and all(
        tensor.storage_offset() % 2 == 0 and tensor.data_ptr() % 4 == 0 for tensor in flat
    )
    return [tensor.view(torch.int32 if is_pairs else torch.int16) for tensor in flat], is_pairs


@cache
def mx_constants(element: Element, rule: ScaleRule, rounding: Rounding) -> dict[str, object]:
    """Compile-time constants of the MX kernels."""
    return {
        "OFFSET": rule_offset(element, rule),
        "EMAX": element.emax,
        "EMIN": element.emin,
        "MANTISSA_BITS": element.mantissa_bits,
        "MAX": element.max if can_saturate(rule) else None,
        "IS_AWAY": rounding is Rounding.AWAY,
    }


def _mx_constants(spec: QuantSpec) -> dict[str, Any]:
    constants = mx_constants(spec.fmt.element, spec.scale_rule, spec.rounding)
    return {**constants, "enable_fp_fusion": False}
