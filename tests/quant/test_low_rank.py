"""The low-rank part of an operand: against LAPACK's factorisations, and the formula of Metis."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from quantexp.formats import quantise
from quantexp.formats.philox import random_integers
from quantexp.formats.spec import Part, QuantSpec, get_format
from quantexp.formats.types import Take
from quantexp.proof.arithmetic.parts import part_of
from quantexp.quant.linear import fprop
from quantexp.quant.parts import take_part
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.quant.sites import Site
from quantexp.quant.slots import resolve_site
from quantexp.schema import LinearFprop, LinearSite, Slot
from quantexp.schema import Part as PartConfig

HIGH = QuantSpec(get_format("bf16"))


def of_rank(number: int | None = None, share: float | None = None) -> Part:
    return Part(Take.LOW_RANK, HIGH, number=number, share=share)


def decaying(rows: int, width: int, power: float = 1.0, seed: int = 1) -> Tensor:
    """A matrix whose singular values are n^-power, in bf16."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    return (u * (torch.arange(len(s)) + 1.0) ** -power @ vh).bfloat16().float()


def by_lapack(x: Tensor, rank: int) -> np.ndarray:
    """Algorithms 4.4 and 5.1 of Halko et al. in float64, with the part's own random numbers."""
    numbers = random_integers(x.shape[1] * rank, 0, 0, x.device).double().numpy()
    a, start = x.double().numpy(), (numbers // 2**16 - 127.5).reshape(-1, rank)
    q = np.linalg.qr(a @ start).Q
    for _ in range(2):
        q = np.linalg.qr(a @ np.linalg.qr(a.T @ q).Q).Q
    return q @ (q.T @ a)


@pytest.mark.parametrize(
    ("rows", "width", "rank"), [(96, 64, 1), (64, 200, 8), (512, 384, 12), (7, 300, 7), (1, 32, 1)]
)
def test_the_part_is_the_projection_onto_the_range_of_subspace_iteration(
    rows: int, width: int, rank: int
) -> None:
    """Factors have (52 - log2 n) / 2 bits, 21 and more here: each sum errs by the root of n such roundings."""
    x = decaying(rows, width)
    error = np.linalg.norm(take_part(x, of_rank(rank)).double().numpy() - by_lapack(x, rank))
    assert error <= 2.0**-21 * math.sqrt(max(rows, width)) * float(x.norm())


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_what_remains_is_hardly_larger_than_that_of_the_singular_value_decomposition(
    power: float,
) -> None:
    x = decaying(256, 192, power)
    s = np.linalg.svd(x.double().numpy(), compute_uv=False)
    for rank in (2, 10):
        rest = (x - take_part(x, of_rank(rank))).double().norm()
        best = float(np.sqrt((s[rank:] ** 2).sum()))
        assert best * (1 - 1e-6) <= rest <= best * 1.03


def test_a_matrix_of_that_rank_is_taken_whole() -> None:
    columns, rows = (torch.randint(-8, 9, (n, 3), generator=torch.manual_seed(n)) for n in (90, 70))
    x = (columns @ rows.T).float()
    y = take_part(x, of_rank(3))
    assert (y - x).abs().max() <= 2.0**-18 * x.abs().max()
    assert torch.linalg.matrix_rank(y.double(), atol=1e-3) == 3
    full = decaying(24, 40)
    assert (take_part(full, of_rank(10**9)) - full).abs().max() <= 2.0**-18


def test_a_share_is_that_of_the_smaller_side() -> None:
    x = decaying(64, 100, seed=3)
    assert torch.equal(take_part(x, of_rank(share=0.05)), take_part(x, of_rank(3)))
    assert torch.equal(take_part(x, of_rank(share=1e-9)), take_part(x, of_rank(1)))
    stack = x.reshape(32, 2, 100)
    assert torch.equal(take_part(stack, of_rank(3)), take_part(x, of_rank(3)).view_as(stack))


def test_no_order_of_rows_changes_what_is_taken() -> None:
    x, order = decaying(257, 96), torch.randperm(257, generator=torch.manual_seed(3))
    assert torch.equal(take_part(x, of_rank(5))[order], take_part(x[order], of_rank(5)))


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_nothing_is_taken_of_what_is_not_finite(number: float) -> None:
    x = decaying(20, 30)
    x[4, 7] = number
    assert not take_part(x, of_rank(2)).any()


@pytest.mark.parametrize("shape", [(64, 2, 24), (1, 1, 24), (7, 24), (300, 40), (0, 24)])
@pytest.mark.parametrize("kind", ["normal", "tiny", "large", "zero", "equal", "nan", "one row"])
def test_whole_numbers_of_the_proof_take_the_same(shape: tuple[int, ...], kind: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    x *= {"tiny": 1e-40, "large": 1e37, "zero": 0.0}.get(kind, 1.0)
    if kind == "equal":
        x = torch.full_like(x, -3.0)
    elif kind == "nan" and x.numel():
        x.view(-1)[-1] = math.nan
    elif kind == "one row":
        x[1:] = 0.0
    for part in (of_rank(1), of_rank(3), of_rank(10**9), of_rank(share=0.2)):
        taken = take_part(x, part)
        assert torch.equal(part_of(x, part, is_weight=False), taken)
        assert torch.equal(
            part_of(x.reshape(-1, shape[-1]), part, is_weight=True).view_as(x), taken
        )
        assert bool(taken.any()) == (bool(x.numel()) and kind not in ("zero", "nan"))


def test_metis_is_the_product_of_low_rank_parts_and_remainders() -> None:
    """Y = (P_X + Q(X - P_X)) (P_W + Q(W - P_W))^T, with P by LAPACK in bf16 (arXiv 2509.00404)."""
    x, w = decaying(96, 64).bfloat16(), decaying(40, 64, seed=2).bfloat16()
    slot = Slot(parts=[PartConfig("low_rank", number=4, format="bf16")])
    site = LinearSite(format="nvfp4", fprop=LinearFprop(x=slot, w=slot))
    y = fprop(ModulePrecision(ModuleId(0, "fc1"), resolve_site(Site.LINEAR, site)), x, w).double()
    sums, plain = [], []
    for each in (x, w):
        part = torch.from_numpy(by_lapack(each.float(), 4)).bfloat16().float()
        rest = quantise(each.float() - part, "nvfp4", axis=-1)
        sums.append(part.double() + rest.double())
        plain.append(quantise(each.float(), "nvfp4", axis=-1).double())
    true = x.double() @ w.double().T
    # A part that differs in a last bit may round to another bf16 number, and its remainder with it.
    assert (y - sums[0] @ sums[1].T).norm() <= 2.0**-7 * true.norm()
    assert (y - true).norm() < 0.5 * (plain[0] @ plain[1].T - true).norm()
