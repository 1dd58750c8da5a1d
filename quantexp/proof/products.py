"""Compares what leaves a module with the product of the operands that were declared, in float64.

    out_ij = s sum_k l_ik r_kj        l, r the expected operands, K the extent of k, s a factor

A matrix product on hardware differs from that by the roundings of its result and by those of its sums in float32.
Rounding to a dtype changes a number by at most a part u of it (2^-8 in bfloat16, 2^-11 in float16, 2^-24 in float32). K
sums in float32 are off by at most lambda sqrt(K) 2^-24 sum_k |l_ik r_kj| with a probability of at least
1 - 2 exp(-lambda^2 / 2), in any order (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4); with lambda = 8
that is 1 - 3e-14. The last sum is at most |l_i| |r_j| (Cauchy-Schwarz). Processors may take operands and results below
2^-126 for zero, and do for bfloat16. A value beyond these bounds is no product of these operands. Inf and NaN are right
where something that is rounded on the way to the result may exceed its dtype.

A whole product is checked by a projection besides (Freivalds): for random signs d_j the sums over j of d_j out_ij and
of d_j times the product differ by a sum of the same roundings with random signs, which exceeds lambda times its root
mean square with the same probability (Khintchine's inequality, Hoeffding). It finds a single wrong row or column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

#: Multiples of the root mean square that an error of random sign must not exceed: 3e-14 by chance.
LAMBDA = 8.0
#: The smallest normal number of float32 and bfloat16.
_TINY = 2.0**-126
#: Elements of an operand that are converted at once: they stay in a core's cache.
_STRIP = 1 << 17


@dataclass(frozen=True)
class Reference:
    """Some elements of a product in float64, and what bounds the error of any implementation."""

    #: [rows, columns]
    values: Tensor
    #: The sum of the magnitudes of all parts that were rounded, of the same shape.
    rounded: Tensor
    #: sqrt(K) |l_i| |r_j|, of the same shape, or what makes it, as few checks need it.
    sums: Tensor | Callable[[], Tensor]
    #: What flushing numbers below float32's normal ones to zero changes at most.
    flushed: float = 0.0
    #: Roundings to the dtype of the result on the way to it.
    roundings: int = 1
    #: The largest magnitude of what else is rounded on the way, of each element or of all; NaN if it is not known.
    largest: Tensor | float = 0.0

    @cached_property
    def summed(self) -> Tensor:
        """sqrt(K) |l_i| |r_j|."""
        return self.sums if isinstance(self.sums, Tensor) else self.sums()

    def plus(self, other: Reference) -> Reference:
        """The sum of two products that are rounded before they are added."""
        return Reference(
            self.values + other.values,
            self.rounded + other.rounded,
            lambda: self.summed + other.summed,
            self.flushed + other.flushed,
            max(self.roundings, other.roundings),
            self.largest + other.largest,
        )

    def zero_where(self, clipped: Tensor | None) -> Reference:
        """The same with zeros at some elements."""
        if clipped is None:
            return self
        return replace(
            self,
            values=self.values.masked_fill(clipped, 0.0),
            rounded=self.rounded.masked_fill(clipped, 0.0),
            sums=self.summed.masked_fill(clipped, 0.0),
        )

    def times(self, factors: Tensor | None) -> Reference:
        """The same, rounded before each element is multiplied by a float32 factor of at most 3 and rounded again."""
        if factors is None:
            return self
        # What is rounded in float32 on the way, a unit of 2^-24 each, is within LAMBDA of them.
        return replace(
            self.again(),
            values=self.values * factors,
            rounded=self.rounded * factors,
            sums=(self.summed + self.rounded) * factors,
            flushed=3 * self.flushed,
            largest=self.rounded,
        )

    def divided(self, sums: Tensor, dtype: torch.dtype) -> Reference:
        """The same, rounded to a dtype before each row is divided by a positive float32 number and rounded again."""
        least = self.flushed + torch.finfo(dtype).smallest_normal * unit(dtype)
        factors = 1 / sums.double()
        # What is lost below the smallest numbers grows with the row.
        parts = self.summed + self.rounded + least * 2.0**24 / LAMBDA
        return replace(
            self.again(),
            values=self.values * factors,
            rounded=self.rounded * factors,
            sums=parts * factors,
            largest=self.rounded,
        )

    def slack(self, dtype: torch.dtype, *, with_sums: bool = True) -> Tensor:
        """By how much elements of a dtype may differ; `with_sums` adds what sums in float32 may do."""
        smallest = torch.finfo(dtype).smallest_normal
        slack = self.rounded * (1.01 * self.roundings * unit(dtype))
        if with_sums:
            slack.add_(self.summed, alpha=LAMBDA * 2.0**-24)
        return slack.add_(self.flushed + self.roundings * smallest * unit(dtype))

    def again(self, roundings: int = 1) -> Reference:
        """The same after more roundings."""
        return replace(self, roundings=self.roundings + roundings)

    def scaled_last(self, scale: float) -> Reference:
        """The same, of a product that was rounded before it was scaled."""
        return replace(self.again(), largest=self.rounded / abs(scale))


#: What elements of a product must be, made when it is asked for.
Expected = Callable[[], Reference]


def reference(left_MK: Tensor, right_KN: Tensor, scale: float = 1.0) -> Reference:
    """Some rows of the left operand times some columns of the right."""
    left, right = left_MK.double(), right_KN.double()
    K = left.shape[1]
    values = left @ right
    if scale != 1.0:
        values.mul_(scale)

    def summed() -> Tensor:
        # With these added to the norms, it has what is flushed to zero in K terms, but for K of the smallest number.
        least = math.sqrt(K) * _TINY * 2.0**24 / LAMBDA
        norm = torch.linalg.vector_norm  # `Tensor.norm` is a function in Python
        left_M, right_N = norm(left, dim=1).add_(least), norm(right, dim=0).add_(least)
        return torch.outer(left_M.mul_(math.sqrt(K) * abs(scale)), right_N)

    return Reference(values, values.abs(), summed, K * _TINY)


def flushed(left: Tensor, right: Tensor) -> float:
    """What one term of a product can lose where operands and results below 2^-126 are taken for zero."""
    return _TINY * (1 + max(largest_finite(left), largest_finite(right)))


def largest_finite(x: Tensor) -> float:
    """The largest magnitude of the finite elements; 0 if there are none.

    What a non-finite element touches is not compared; the others lose what they lose without it.
    """
    return float(x.nan_to_num(0.0, 0.0, 0.0).abs().amax()) if x.numel() else 0.0


def num_wrong(out_MN: Tensor, expected: Reference) -> int:
    """How many elements are not those of the product, by the bounds above; a non-finite reference bounds nothing."""
    largest = torch.finfo(out_MN.dtype).max
    out, values, slack = out_MN.double(), expected.values, expected.slack(out_MN.dtype)
    is_right = (out - values).abs() <= slack
    overflows = (expected.rounded + slack >= largest) | ~(
        slack.new_tensor(1.01) * expected.largest < largest
    )
    is_single = expected.roundings == 1
    is_right |= overflows & (out == values.sign() * math.inf if is_single else ~out.isfinite())
    return int((~is_right & values.isfinite() & expected.summed.isfinite()).sum())


def are_right(products: Sequence[tuple[Tensor, Reference]]) -> bool:
    """Whether all elements are finite and those of their products; otherwise `num_wrong` decides.

    In 16 bits the bound of their rounding alone is mostly enough, and takes half of the time.
    """
    has_16_bits = all(out.dtype.itemsize == 2 for out, _ in products)
    return (has_16_bits and _are_within(products, with_sums=False)) or _are_within(products)


def _are_within(products: Sequence[tuple[Tensor, Reference]], *, with_sums: bool = True) -> bool:
    each = [
        ((out.double() - of.values).abs_() <= of.slack(out.dtype, with_sums=with_sums)).all()
        for out, of in products
    ]
    return bool(each[0] if len(each) == 1 else torch.stack(each).all()) if each else True


def unit(dtype: torch.dtype) -> float:
    """The largest relative change by rounding to a dtype."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Projection:
    """The products of all rows with the random signs of the columns, and the bounds of their errors."""

    signs_N: Tensor
    values_M: Tensor
    #: |l_i| |r|, the last norm that of all elements: no element is larger.
    largest_M: Tensor
    #: LAMBDA sqrt(K) 2^-24 |l_i| |r|, and what is flushed to zero.
    summed_M: Tensor


def project(left_MK: Tensor, right_KN: Tensor, scale: float, seed: int) -> Projection:
    """Project a product of whole matrices without a copy of them.

    Sums of 16-bit operands are taken in float32, whose errors are far below those of the product's rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (right_KN.shape[1],), generator=generator).mul_(2).sub_(1)
    signs = signs.to(right_KN.device, _wide(right_KN))
    through_K, norm = _times(right_KN, signs)
    values, norms_M = _times(left_MK, through_K, by_row=True)
    largest = norm * norms_M * abs(scale)
    K, N = right_KN.shape
    lost = K * N * _TINY * (1 + norm + norms_M)
    summed = LAMBDA * 2.0**-24 * math.sqrt(K) * largest
    return Projection(signs, values * scale, largest, summed + lost)


def num_wrong_rows(out_MN: Tensor, projection: Projection) -> int:
    """How many rows do not have the projection of the product."""
    own, norms = _times(out_MN, projection.signs_N, by_row=True)
    info = torch.finfo(out_MN.dtype)
    slack = LAMBDA * 1.01 * unit(out_MN.dtype) * norms + 2 * projection.summed_M
    slack += LAMBDA * math.sqrt(out_MN.shape[1]) * info.smallest_normal
    is_right = (own - projection.values_M).abs() <= slack
    is_right |= ~own.isfinite() & (projection.largest_M >= info.max)
    return int((~is_right & projection.values_M.isfinite() & projection.largest_M.isfinite()).sum())


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float32 else torch.float32


def _times(matrix: Tensor, vector: Tensor, *, by_row: bool = False) -> tuple[Tensor, Tensor]:
    """A matrix times a vector, and its norm, or those of its rows; strip by strip, in the order of memory."""
    dtype = _wide(matrix)
    vector = vector.to(dtype)
    if not by_row and matrix.stride(0) == 1 and matrix.stride(1) != 1:
        product = torch.zeros(len(matrix), dtype=dtype, device=matrix.device)
        columns = torch.split(matrix.t(), max(1, _STRIP // max(1, len(matrix))))
        norms = []
        for part, of_part in zip(columns, torch.split(vector, len(columns[0])), strict=True):
            wide = part.to(dtype)
            product.addmv_(wide.t(), of_part)
            norms.append(torch.linalg.vector_norm(wide))
        return product, _float64_norms(torch.stack(norms), columns).norm()
    parts, norms = [], []
    strips = torch.split(matrix, max(1, _STRIP // max(1, matrix.shape[1])))
    for rows in strips:
        wide = rows.to(dtype)
        parts.append(wide @ vector)
        norms.append(torch.linalg.vector_norm(wide, dim=1 if by_row else None))
    if by_row:
        return torch.cat(parts), _float64_norms(torch.cat(norms), matrix)
    return torch.cat(parts), _float64_norms(torch.stack(norms), strips).norm()


def _float64_norms(norms: Tensor, parts: Tensor | Sequence[Tensor]) -> Tensor:
    """Norms in float64; those whose sums in float32 may have lost a square that left its range are taken again."""
    norms = norms.double()
    least = parts[0].numel() * 2.0**-50 if len(norms) else 0.0
    beyond = ~((norms > least) & (norms < 2.0**60))
    for n in beyond.nonzero().flatten().tolist():
        norms[n] = torch.linalg.vector_norm(parts[n], dtype=torch.float64)
    return norms
