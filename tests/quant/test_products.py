"""Products of 16-bit matrices through fp32, on any processor."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from quantexp.quant import products
from quantexp.quant.products import go_through_fp32, through_fp32

#: M rows, N columns, K summed over, B products of a batch
M, N, K, B = 24, 40, 56, 5
SIXTEEN_BIT = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layouts(rows: int, columns: int, dtype: torch.dtype, *batch: int) -> Iterator[Tensor]:
    """The same matrix in several layouts: by rows, by columns, in every other row and column of a larger one."""
    x = normal(*batch, rows, columns, dtype=dtype, seed=rows)
    yield x
    yield x.mT.contiguous().mT
    wide = x.new_zeros(*batch, 2 * rows, 2 * columns)
    wide[..., ::2, ::2] = x
    yield wide[..., ::2, ::2]


def assert_same(y: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


@SIXTEEN_BIT
@pytest.mark.parametrize("batch", [(), (B,)], ids=["matrix", "batch"])
def test_product_is_the_fp32_product_rounded_once(
    dtype: torch.dtype, batch: tuple[int, ...]
) -> None:
    pairs = itertools.product(layouts(M, K, dtype, *batch), layouts(K, N, dtype, *batch))
    for a, b in pairs:
        expected = (a.contiguous().float() @ b.contiguous().float()).to(dtype)
        with through_fp32({dtype}):
            y = torch.matmul(a, b)
        assert_same(y, expected)
        assert y.is_contiguous()


@SIXTEEN_BIT
@pytest.mark.parametrize("batch", [(), (B,)], ids=["matrix", "batch"])
def test_addition_and_scaling_precede_the_rounding(
    dtype: torch.dtype, batch: tuple[int, ...]
) -> None:
    a, b = normal(*batch, M, K, dtype=dtype), normal(*batch, K, N, dtype=dtype)
    add = torch.addmm if not batch else torch.baddbmm
    row = normal(N, dtype=dtype, seed=1)
    product = a.float() @ b.float()
    with through_fp32({dtype}):
        assert_same(
            add(row, a, b, beta=0.5, alpha=1.5), (product * 1.5 + row.float() * 0.5).to(dtype)
        )
        unused = torch.full((), float("nan"), dtype=dtype)
        assert_same(add(unused, a, b, beta=0.0, alpha=4 / 3), (product * (4 / 3)).to(dtype))


@SIXTEEN_BIT
def test_out_and_in_place_forms_are_the_same_product(dtype: torch.dtype) -> None:
    a, b, c = (
        normal(M, K, dtype=dtype),
        normal(K, N, dtype=dtype),
        normal(M, N, dtype=dtype, seed=1),
    )
    three = [x.expand(B, -1, -1) for x in (a, b, c)]
    with through_fp32({dtype}):
        y, z = torch.empty_like(c), torch.empty_like(three[2].contiguous())
        assert_same(torch.mm(a, b, out=y), a @ b)
        assert_same(torch.addmm(c, a, b, out=y), torch.addmm(c, a, b))
        assert_same(c.clone().addmm_(a, b), torch.addmm(c, a, b))
        assert_same(torch.bmm(*three[:2], out=z), torch.bmm(*three[:2]))
        assert_same(torch.baddbmm(three[2], *three[:2], out=z), torch.baddbmm(three[2], *three[:2]))
        assert_same(three[2].clone().baddbmm_(*three[:2]), torch.baddbmm(three[2], *three[:2]))


@pytest.mark.parametrize("kept_bytes", [4 * K, 4 * 7 * K, 1 << 20])
@pytest.mark.parametrize("batch", [(), (B,)], ids=["matrix", "batch"])
def test_strips_give_what_the_whole_gives(
    batch: tuple[int, ...], kept_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small whole numbers, whose sums are exact in every order."""
    monkeypatch.setattr(products, "STRIP_BYTES", 4 * 3 * K)
    monkeypatch.setattr(products, "KEPT_BYTES", kept_bytes)
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((M, N), (N, M), (1, N)):
        a = torch.randint(-8, 9, (*batch, rows, K), generator=generator).bfloat16()
        b = torch.randint(-8, 9, (*batch, K, columns), generator=generator).bfloat16()
        c = torch.randint(-8, 9, (*batch, rows, columns), generator=generator).bfloat16()
        add = torch.addmm if not batch else torch.baddbmm
        with through_fp32({torch.bfloat16}):
            y, z = a @ b, add(c, a, b, alpha=2)
        exact = a.double() @ b.double()
        assert_same(y, exact.bfloat16())
        assert_same(z, (c.double() + 2 * exact).bfloat16())


@SIXTEEN_BIT
def test_error_is_that_of_one_rounding_and_of_sums_in_fp32(dtype: torch.dtype) -> None:
    """Products of two 16-bit numbers are exact in fp32, so K - 1 additions err by at most (K - 1) 2^-24 sum |a b|.

    (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1.) The rounding to 8 or 11 bits adds half a unit
    in the last place. 2^-24 covers fp16 values below its normal range, in units of 2^-24.
    """
    k = 2048
    a, b = normal(M, k, dtype=dtype), normal(k, N, dtype=dtype, seed=1)
    with through_fp32({dtype}):
        y = a @ b
    exact, magnitudes = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    sums = (k - 1) * 2.0**-24 * magnitudes
    rounding = torch.finfo(dtype).eps / 2 * (exact.abs() + sums)
    assert ((y.double() - exact).abs() <= sums + rounding + 2.0**-24).all()


@SIXTEEN_BIT
@pytest.mark.parametrize("masked", [False, True])
def test_fused_attention_is_that_of_fp32_rounded_once(dtype: torch.dtype, masked: bool) -> None:
    q, k, v, g = (normal(2, 3, 16, 8, dtype=dtype, seed=seed) for seed in range(4))
    mask = normal(16, 16, dtype=dtype, seed=4) if masked else None
    wide_mask = None if mask is None else mask.float()

    def both_ways(qkv: list[Tensor], mask: Tensor | None, dO: Tensor | None) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in qkv]
        o = scaled_dot_product_attention(
            leaves[0], leaves[1], leaves[2], attn_mask=mask, is_causal=mask is None
        )
        return o.detach(), *torch.autograd.grad(o, leaves, dO)

    with through_fp32({dtype}):
        narrow = both_ways([q, k, v], mask, g)
    wide = both_ways([q.float(), k.float(), v.float()], wide_mask, g.float())
    assert_same(narrow[0], wide[0].to(dtype))
    # The backward pass receives the rounded output, which enters the gradients like the precision of their operands.
    for y, expected in zip(narrow[1:], wide[1:], strict=True):
        bound = 4 * torch.finfo(dtype).eps * expected.abs().max()
        assert ((y.float() - expected).abs() <= bound).all()


def test_products_of_other_dtypes_are_torchs_own() -> None:
    fp32, fp16 = normal(M, K, dtype=torch.float32), normal(M, K, dtype=torch.float16)
    before = fp32 @ fp32.t(), fp16 @ fp16.t(), torch.addmm(fp32[:, :1], fp32, fp32.t(), alpha=2)
    with through_fp32({torch.bfloat16}):
        inside = fp32 @ fp32.t(), fp16 @ fp16.t(), torch.addmm(fp32[:, :1], fp32, fp32.t(), alpha=2)
        assert go_through_fp32(torch.bfloat16)
        assert not go_through_fp32(torch.float16)
    for x, y in zip(before, inside, strict=True):
        assert_same(y, x)


@pytest.mark.parametrize(
    ("a", "b"), [((2, 3), (4, 5)), ((2, 3), (3,)), ((2, 0), (0, 5)), ((0, 3), (3, 5))]
)
def test_refused_and_empty_products_are_left_to_torch(
    a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    x, y = torch.zeros(a).bfloat16(), torch.zeros(b).bfloat16()

    def result() -> Tensor | str:
        try:
            return torch.mm(x, y)
        except RuntimeError as error:
            return str(error)

    outside = result()
    with through_fp32({torch.bfloat16}):
        inside = result()
    if isinstance(outside, Tensor):
        assert isinstance(inside, Tensor)
        assert_same(inside, outside)
    else:
        assert inside == outside


def kernels() -> list[str]:
    """The origin of each product's registered CPU kernel."""
    names = ("mm", "mm.out", "bmm", "addmm", "addmm_", "baddbmm.out", products._ATTENTION)
    lines = [
        line
        for name in names
        for line in torch._C._dispatch_dump(f"aten::{name}").splitlines()
        if line.startswith("CPU:")
    ]
    assert len(lines) == len(names)
    return lines


def test_without_dtypes_no_kernel_is_touched() -> None:
    before = kernels()
    with through_fp32([]):
        assert kernels() == before


def test_nothing_is_left_after_the_context_or_an_error() -> None:
    before = kernels()
    with through_fp32({torch.bfloat16}):
        assert all(x != y for x, y in zip(before, kernels(), strict=True))
    assert kernels() == before
    with pytest.raises(ZeroDivisionError), through_fp32({torch.bfloat16}):
        _ = 1 / 0
    assert kernels() == before
    assert not go_through_fp32(torch.bfloat16)


class OperandDtypes(TorchDispatchMode):
    """The dtypes of products' operands as they reach the call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Tensor, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self.calls.append((func.overloadpacket.__name__, args[0].dtype))  # type: ignore[attr-defined]
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_the_same_calls_as_without_fp32() -> None:
    def calls() -> list[tuple[str, torch.dtype]]:
        x, w = (normal(rows, K, dtype=torch.bfloat16).requires_grad_() for rows in (M, N))
        with OperandDtypes() as mode:
            (x @ w.t()).sum().backward()
        return mode.calls

    outside = calls()
    with through_fp32({torch.bfloat16}):
        assert calls() == outside
    assert outside.count(("mm", torch.bfloat16)) == 3


def test_products_in_other_threads_go_the_same_way() -> None:
    a, b = normal(M, K, dtype=torch.bfloat16), normal(K, N, dtype=torch.bfloat16)
    results: list[Tensor] = []
    with through_fp32({torch.bfloat16}):
        thread = threading.Thread(target=lambda: results.append(a @ b))
        thread.start()
        thread.join()
        with torch.inference_mode():
            results.append(a @ b)
    for y in results:
        assert_same(y, (a.float() @ b.float()).bfloat16())


def test_memory_is_reused_within_its_limit() -> None:
    kernels = products._Kernels(frozenset({torch.bfloat16}))
    by_name = kernels.by_name()
    a, b = normal(700, 3000, dtype=torch.bfloat16), normal(3000, 1500, dtype=torch.bfloat16)
    keyset = torch._C._dispatch_keys(a) & torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    for x, y in ((a, b), (b.t(), a.t()), (a.t(), a), (b, b.t())):
        by_name["mm"](keyset, x, y)
    num_bytes = sum(x.nbytes for x in kernels.scratch.buffers.values())
    assert 0 < num_bytes <= products.SCRATCH_BYTES


def test_no_warning_is_raised_in_a_process_whose_warnings_are_errors() -> None:
    script = (
        "import torch\n"
        "from quantexp.quant.products import through_fp32\n"
        "with through_fp32({torch.bfloat16}):\n"
        "    torch.ones(2, 2).bfloat16() @ torch.ones(2, 2).bfloat16()\n"
    )
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")
