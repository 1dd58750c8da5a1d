"""The tensor that an operand with a given source must be, bit for bit, by arithmetic of the proof's own.

The proof of engagement compares an operand with the image of its source. A fault in the code that quantises must not
change both: see `quantexp.proof.arithmetic`. Only a format in Python is computed by the user's class, which is its
definition.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from quantexp.formats.definitions.python import DIGEST, PYTHON, instance_of
from quantexp.formats.kernels import exact, exact_in_pool
from quantexp.formats.spec import QuantSpec
from quantexp.formats.types import Family, Rounding, Scaling
from quantexp.proof.arithmetic import tables
from quantexp.proof.arithmetic.layout import Tiles, blocks, chunk_limit, chunks
from quantexp.proof.arithmetic.levels import of_levels
from quantexp.proof.arithmetic.philox import integers_of_whole, random_integers
from quantexp.proof.arithmetic.rounding import noise, slopes, under
from quantexp.proof.arithmetic.scales import divisors, finite_amax, is_of_amax, tensor_scale
from quantexp.proof.arithmetic.transform import transformed

__all__ = [
    "derivative",
    "image",
    "noise_slope",
    "num_differing",
    "own_amax",
    "random_integers",
]


@exact
def image(
    x: Tensor,
    spec: QuantSpec,
    axis: int,
    *,
    amax: Tensor | None = None,
    signs: Tensor | None = None,
    seed: int | None = None,
    offset: int = 0,
    positions: Tensor | None = None,
) -> Tensor:
    """The operand that a source must become, in x's shape and dtype; x itself in the working precision, or if empty.

    The image of a part is the part of the image if it consists of whole blocks, and amax and positions are those of the
    whole tensor. NaN or Inf makes its block NaN; without blocks, see `quantexp.formats.quantise`.

    Args:
        x: the source in high precision, never quantised: bf16, fp16 or fp32, of any shape and strides.
        spec: what the slot declares.
        axis: the dimension of x that blocks and the transform run along.
        amax: of the whole tensor after its transform, 0-dim, where its scale depends on one; None means that of x.
        signs: of a random Hadamard transform, float32 of shape (block,).
        seed: of stochastic rounding, and of a format in Python.
        offset: the same.
        positions: int64 of x's shape: the position of each element in the whole tensor, in row-major order; None means
            that x is whole.
    """
    if not spec.quantised or not x.numel():
        return x
    axis %= max(x.ndim, 1)
    v = transformed(x, spec, axis, signs)
    if spec.fmt.family is Family.PYTHON:
        return _by_class(v, spec, axis, seed, offset).to(x.dtype)
    scale = 1.0
    if spec.scaling is not Scaling.NONE:
        scale = tensor_scale(spec, float(finite_amax(v) if amax is None else amax))
    t = _scale(scale, x.device)
    random = None
    if spec.rounding is Rounding.STOCHASTIC:
        assert seed is not None, "stochastic rounding has a seed"
        random = (
            integers_of_whole(x, seed, offset)
            if positions is None
            else random_integers(positions, seed, offset)
        )
    return _image(v, x.dtype, spec, axis, t, random)


@exact
def num_differing(
    operand: Tensor,
    x: Tensor,
    spec: QuantSpec,
    axis: int,
    *,
    amax: Tensor | None = None,
    signs: Tensor | None = None,
    seed: int | None = None,
    offset: int = 0,
    positions: Tensor | None = None,
) -> int:
    """The number of elements of an operand, of x's shape and dtype, whose bits are not those of `image`.

    The two zeros differ; NaN equals NaN of any bits.
    """
    assert (operand.shape, operand.dtype) == (x.shape, x.dtype), "an operand is like its source"
    operand, x = operand.resolve_neg(), x.resolve_neg()
    if spec.quantised and tables.has_tables(x, spec):
        num = tables.num_differing(x, operand, spec, axis % x.ndim, amax)
        if num is not None:
            return num
    expected = image(
        x, spec, axis, amax=amax, signs=signs, seed=seed, offset=offset, positions=positions
    )
    bits = torch.int32 if x.dtype == torch.float32 else torch.int16
    a, b = (tensor.detach().view(bits) for tensor in (operand, expected))
    if torch.equal(a, b):
        return 0
    return int(((a != b) & ~(operand.isnan() & expected.isnan())).sum())


@exact
def own_amax(x: Tensor, spec: QuantSpec, axis: int, signs: Tensor | None = None) -> Tensor:
    """The largest finite magnitude of x after its transform, 0-dim float32; 0 if there is none."""
    return finite_amax(transformed(x, spec, axis % max(x.ndim, 1), signs))


@lru_cache(maxsize=64)
def _scale(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)


@exact_in_pool
def _image(
    v: Tensor,
    dtype: torch.dtype,
    spec: QuantSpec,
    axis: int,
    t: Tensor,
    random: Tensor | None,
) -> Tensor:
    """The image of v, after its transform, under the scale t of the tensor, and random numbers of its shape."""
    if spec.fmt.across > 1:
        tiles = Tiles(v.shape, spec, axis)
        y_OBKI = tiles.of(v)
        drawn = None if random is None else tiles.of(random)
        _fill(y_OBKI, y_OBKI, spec, t, drawn)
        return tiles.joined(y_OBKI).to(dtype)
    sources = [
        blocks(tensor.contiguous(), spec, axis) for tensor in (v, random) if tensor is not None
    ]
    if len(sources[0]) == 1 and v.numel() <= chunk_limit(v):
        return _of_blocks(
            sources[0][0], spec, t, sources[1][0] if sources[1:] else None, dtype
        ).view(v.shape)
    y = torch.empty(v.shape, dtype=dtype, device=v.device)
    parts = [sources[0], blocks(y, spec, axis), *sources[1:]]
    for v_OBKI, y_OBKI, *draws in zip(*parts, strict=True):
        _fill(y_OBKI, v_OBKI, spec, t, draws[0] if draws else None)
    return y


def _fill(
    y_OBKI: Tensor, v_OBKI: Tensor, spec: QuantSpec, t: Tensor, random_OBKI: Tensor | None
) -> None:
    """Write the images of blocks, which may be v itself."""
    for at in chunks(v_OBKI):
        random = None if random_OBKI is None else random_OBKI[at]
        y_OBKI[at] = _of_blocks(v_OBKI[at], spec, t, random, y_OBKI.dtype)


@exact
def derivative(x: Tensor, spec: QuantSpec, axis: int, power: float, amax: Tensor | None) -> Tensor:
    """What DGE multiplies the gradient of each element of x by, float32; arguments as of `image`."""
    return _in_blocks(x, spec, axis, amax, lambda v, d: slopes(v, d, spec, power))


@exact
def noise_slope(x: Tensor, spec: QuantSpec, axis: int, amax: Tensor | None) -> Tensor:
    """The derivative of the variance of each element's stochastic rounding, float32; arguments as of `image`."""
    return _in_blocks(x, spec, axis, amax, lambda v, d: noise(v, d, spec))


def _in_blocks(
    x: Tensor,
    spec: QuantSpec,
    axis: int,
    amax: Tensor | None,
    of: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """A function of the elements and of the factors of their blocks, float32."""
    scale = 1.0
    if spec.scaling is not Scaling.NONE:
        scale = tensor_scale(spec, float(finite_amax(x) if amax is None else amax))
    t = _scale(scale, x.device)
    if spec.fmt.across > 1:
        tiles = Tiles(x.shape, spec, axis)
        v_OBKI = tiles.of(x).float()
        return tiles.joined(of(v_OBKI, divisors(v_OBKI, spec, t)).float())
    result = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    both = zip(blocks(x.contiguous(), spec, axis), blocks(result, spec, axis), strict=True)
    for x_OBKI, y_OBKI in both:
        for at in chunks(x_OBKI):
            v = x_OBKI[at].float()
            y_OBKI[at] = of(v, divisors(v, spec, t))
    return result


def _of_blocks(
    v_OBKI: Tensor, spec: QuantSpec, t: Tensor, random_OBKI: Tensor | None, dtype: torch.dtype
) -> Tensor:
    v = v_OBKI.float()
    if not is_of_amax(spec):
        return of_levels(v, spec, t, random_OBKI).to(dtype)
    return under(v, divisors(v, spec, t), spec, random_OBKI).to(dtype)


def _by_class(v: Tensor, spec: QuantSpec, axis: int, seed: int | None, offset: int) -> Tensor:
    """The result of a format in Python, under the generator that `quantexp.formats.quantising` defines."""
    content = json.loads(spec.fmt.definition)
    words = hashlib.sha256(f"{seed or 0} {offset}".encode()).digest()
    generator = torch.Generator(device=v.device)
    generator.manual_seed(int.from_bytes(words[:8], "big") >> 1)
    instance = instance_of(content[PYTHON], content.get(DIGEST))
    with torch.no_grad():
        return instance.quantise(v.detach().clone(), axis=axis, generator=generator)
