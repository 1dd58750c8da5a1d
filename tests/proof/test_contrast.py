"""Results of fused attention against named alternatives: honest kernels are never one, and planted ones are.

The kernels are torch's own and two that round otherwise: P after it is normalised, and P of blocks of keys under a
running maximum, as in FlashAttention (Dao, 2023, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from quantexp.formats import quantise
from quantexp.proof.contrast import MULTIPLE, Contrasts, contrast, multiplicity
from quantexp.proof.fused_reference import FusedRows
from quantexp.proof.products import num_wrong
from quantexp.quant.sites import Product

PRODUCTS = (Product.FPROP, Product.DGRAD_Q, Product.DGRAD_K, Product.DGRAD_V)
#: q, k, v and dO of one head, [T, D].
Operands = tuple[Tensor, Tensor, Tensor, Tensor]
#: o, dq, dk and dv of operands under a scale.
Kernel = Callable[..., tuple[Tensor, ...]]
T, D = 96, 32


def operands(seed: int, dtype: torch.dtype, size: float = 0.5, width: int = 64) -> Operands:
    """q, k and v are linear in the same tokens, as in a layer; scores have a deviation of about size^2 sqrt(D)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, width, generator=generator)
    weights = [torch.randn(width, D, generator=generator) * size / width**0.5 for _ in range(3)]
    q, k, v = (x @ w for w in weights)
    return q.to(dtype), k.to(dtype), v.to(dtype), torch.randn(T, D, generator=generator).to(dtype)


def quantised(own: Operands) -> Operands:
    """With q and k in mxfp8."""
    q, k, v, dO = own
    return quantise(q, "mxfp8"), quantise(k, "mxfp8"), v, dO


def torchs(own: Operands, scale: float) -> tuple[Tensor, ...]:
    """By scaled_dot_product_attention."""
    leaves = [x.clone().requires_grad_() for x in own[:3]]
    q, k, v = (x[None, None] for x in leaves)
    o = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0, 0]
    return o.detach(), *torch.autograd.grad(o, leaves, own[3])


def emulated(own: Operands, scale: float, block: int) -> tuple[Tensor, ...]:
    """In float32, with P rounded in blocks of keys before it is normalised; 0 rounds the normalised P."""
    dtype = own[0].dtype
    q, k, v, dO = (x.float() for x in own)

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    S = (q @ k.t() * scale).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
    P = S.softmax(dim=1)
    o = rounded(P) @ v
    if block:
        largest, total, o = S[:, :1], torch.zeros(T, 1), torch.zeros(T, D)
        for keys in torch.arange(T).split(block):
            now = torch.maximum(largest, S[:, keys].amax(dim=1, keepdim=True))
            part, before = (S[:, keys] - now).exp(), (largest - now).exp()
            total = total * before + part.sum(dim=1, keepdim=True)
            o, largest = o * before + rounded(part) @ v[keys], now
        o = o / total
    o = rounded(o)
    dS = rounded(P * (dO @ v.t() - (o * dO).sum(dim=1, keepdim=True)))
    results = o, dS @ k * scale, dS.t() @ q * scale, rounded(P).t() @ dO
    return tuple(x.to(dtype) for x in results)


KERNELS: dict[str, Kernel] = {
    "torch": torchs,
    "normalised": partial(emulated, block=0),
    "blocks": partial(emulated, block=16),
}


def contrasts(
    seen: Tensor, product: Product, expected: Operands, sources: Operands, scale: float
) -> Contrasts:
    """Those of one result to the sources of q and k, and to a multiple."""
    keys, hidden = torch.arange(T), torch.ones(T, T, dtype=torch.bool).triu(1)

    def rows(own: Operands) -> FusedRows:
        return FusedRows.of(*own[:3], hidden, scale)

    dO = None if product is Product.FPROP else expected[3].double()
    reference = rows(expected).product(product, dO, keys)
    parts = [rows(expected).rounded(product, dO, keys)]
    other = rows(sources).rounded(product, dO, keys)
    equal = multiplicity(expected[0]) * multiplicity(expected[1])
    alternatives = {MULTIPLE: None, "q and k": other.left @ other.right}
    result = Contrasts()
    result.add(
        {name: contrast(seen, reference, parts, x, equal) for name, x in alternatives.items()}
    )
    return result


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [0.02, 0.2, 0.5, 2.0])
def test_an_honest_kernel_is_no_alternative(kernel: str, dtype: torch.dtype, size: float) -> None:
    for seed in range(4):
        sources = operands(seed, dtype, size)
        expected, scale = quantised(sources), D**-0.5
        for product, seen in zip(PRODUCTS, KERNELS[kernel](expected, scale), strict=True):
            assert not contrasts(seen, product, expected, sources, scale).words()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gradient", [1e-7, 1e-5, 1e-3, 1.0])
def test_an_honest_kernel_is_within_the_bounds(
    kernel: str, dtype: torch.dtype, gradient: float
) -> None:
    """Gradients and probabilities may be below fp16's normal numbers."""
    keys, hidden = torch.arange(T), torch.ones(T, T, dtype=torch.bool).triu(1)
    for seed, size in enumerate([0.1, 0.5, 2.0]):
        q, k, v, dO = operands(seed, dtype, size)
        expected, scale = (q, k, v, (dO * gradient).to(dtype)), D**-0.5
        rows = FusedRows.of(q, k, v, hidden, scale)
        for product, seen in zip(PRODUCTS, KERNELS[kernel](expected, scale), strict=True):
            own = None if product is Product.FPROP else expected[3].double()
            bounds = rows.product(product, own, keys)
            assert num_wrong(seen, bounds.again(2) if own is not None else bounds) == 0, product
            if gradient == 1.0 or own is None:
                assert num_wrong(seen.roll(1, 0), bounds) > T, product


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_kernel_that_gets_the_originals_is_named(kernel: str, dtype: torch.dtype) -> None:
    sources = operands(0, dtype)
    expected, scale = quantised(sources), D**-0.5
    # dv depends on q and k through P alone, which they change by less than it is rounded
    for product, seen in list(zip(PRODUCTS, KERNELS[kernel](sources, scale), strict=True))[:3]:
        words = contrasts(seen, product, expected, sources, scale).words()
        assert words == "it is the product of q and k before quantisation", product


@pytest.mark.parametrize("factor", [0.9, 1.25, -1.0])
def test_a_multiple_is_named(factor: float) -> None:
    sources = operands(1, torch.bfloat16)
    expected, scale = quantised(sources), D**-0.5
    for product, seen in zip(PRODUCTS, torchs(expected, scale), strict=True):
        words = contrasts(seen * factor, product, expected, sources, scale).words()
        assert words.startswith(f"it is {factor:.2g}"), (product, words)
        assert words.endswith("times the product of its operands")


def test_nothing_is_said_where_roundings_hide_the_difference() -> None:
    """Scores of 1e-4 differ by 1e-6 between the operands, and P is rounded to 4e-3."""
    sources = operands(2, torch.bfloat16, size=0.01)
    expected, scale = quantised(sources), D**-0.5
    o = torchs(sources, scale)[0]
    assert not contrasts(o, Product.FPROP, expected, sources, scale).words()


def test_calls_add_up_until_a_difference_is_clear() -> None:
    """One call of scores of 0.05 leaves it open. The noise of n calls is smaller by the root of n."""
    scale, total = D**-0.5, Contrasts()
    for seed in range(8):
        sources = operands(seed, torch.bfloat16, size=0.22)
        expected = quantised(sources)
        o = torchs(sources, scale)[0]
        own = contrasts(o, Product.FPROP, expected, sources, scale)
        assert not own.words()
        total.add(own.sums)
    assert total.words() == "it is the product of q and k before quantisation"


def test_equal_queries_and_keys_make_the_noise_larger() -> None:
    """Roundings of equal elements of P are equal: 100 of them are as one that is 100 times as large."""
    sources = operands(3, torch.bfloat16)
    doubled = [torch.cat([x[: T // 2]] * 2) for x in sources]
    expected = quantised((doubled[0], doubled[1], doubled[2], doubled[3]))
    assert multiplicity(expected[0]) == multiplicity(expected[1]) == 2
    scale = D**-0.5
    seen, rows = torchs(expected, scale)[0], torch.arange(T)
    hidden = rows > rows[:, None]
    fused = FusedRows.of(*expected[:3], hidden, scale)
    reference = fused.product(Product.FPROP, None, rows)
    parts = [fused.rounded(Product.FPROP, None, rows)]
    once, often = (contrast(seen, reference, parts, None, m) for m in (1, 4))
    assert float(often[2]) == pytest.approx(4 * float(once[2]))
    assert torch.equal(once[[0, 1, 3]], often[[0, 1, 3]])


def test_results_that_are_not_finite_say_nothing() -> None:
    sources = operands(4, torch.float16)
    expected, scale = quantised(sources), D**-0.5
    o = torchs(sources, scale)[0]
    o[3, 5] = math.inf
    own = contrasts(o, Product.FPROP, expected, sources, scale)
    assert not own.words()
    assert all(not each.any() for each in own.sums.values())
