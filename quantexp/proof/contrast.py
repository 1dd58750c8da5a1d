"""Whether a result of fused attention is nearer to that of a named alternative than to what was declared.

The bounds of `fused_reference` allow every rounding to be the worst one, so that an error of many small parts of one
kind hides below them. A named alternative, as the result of operands before quantisation, can be told from roundings:

    r = out - ref        d = alternative - ref        share = <G, r> / <G, d>        G about d / variance

The share is 0 of an honest result and 1 of the alternative's. It differs from that by the roundings that are left in r.
Those of the result are independent, as are those of P or dS before they are multiplied, and each is at most u of its
magnitude. A sum of them with the weights of G thus exceeds LAMBDA times the root of the sum of the squared weights with
a probability below 3e-14 (Hoeffding's inequality). What need not have a random sign is added with its magnitude: errors
of float32, and what is rounded below the dtype's normal numbers. Two weaknesses of that model are provided for:

- Equal keys or queries have equal roundings. If none occurs more than m times, the sum of squares is at most m times
  larger (Cauchy-Schwarz).
- Rows of P share a normaliser, and where all scores are near each other their roundings are alike. Both scale a whole
  row of the result, so that G is made orthogonal to each row of it.

An alternative is named if the bound of its noise is at most `_MOST_NOISE` and the share above one half. Results of
several calls are added first: their errors are independent. The last alternative is a multiple of the result itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quantexp.proof.products import LAMBDA, Reference, unit

#: The largest bound of a share's noise at which an alternative is named.
_MOST_NOISE = 0.4
#: A factor of a result that cannot come from roundings that are alike: at most 4 of 2^-8 each.
_LEAST_FACTOR = 2.0**-5


@dataclass(frozen=True)
class Rounded:
    """A product within a kernel, [X, Y] times [Y, Z], whose left operand is P or dS and is rounded before."""

    left: Tensor
    right: Tensor
    #: What elements of the left operand can lose below the dtype's normal numbers.
    lost: Tensor
    #: Roundings of the left operand, each at most u of it.
    roundings: int
    #: Sums over blocks of the reduced extent that may be rounded, each added to the next: torch's CPU kernels do that.
    sums: float = 0.0
    #: Of dS: P in the layout of the left operand, which an error of D multiplies.
    P: Tensor | None = None
    #: Of dS: the sum of squares of what is rounded in D of each query, shape [X, 1] or [1, Y].
    of_D: Tensor | None = None
    #: Of dS: the dimension of the keys in the left operand.
    keys_dim: int = 1

    def variance(self, weights_XZ: Tensor) -> tuple[Tensor, Tensor]:
        """The variance that the roundings have in the weighted sum, in u^2; and the weights of the left operand."""
        own = weights_XZ @ self.right.t()
        variance = (self.roundings * self.left * own).square().sum()
        if self.P is not None and self.of_D is not None:
            of_queries = (self.P * own).sum(dim=self.keys_dim, keepdim=True)
            variance = variance + (of_queries.square() * self.of_D).sum()
        return variance, own


#: <G, r>, <G, d>, the variance of the first, and what bounds the rest of its errors: float64 of shape (4,).
Contrast = Tensor


def contrast(
    seen_XZ: Tensor,
    expected: Reference,
    parts: Sequence[Rounded],
    alternative_XZ: Tensor | None,
    multiplicity: int,
) -> Contrast:
    """How much of an alternative is in a result; None is a multiple of the expected one.

    Zero where something is not finite. `parts` are the products whose sum is expected, `multiplicity` is how often a
    query occurs times how often a key does, at most.
    """
    values, u = expected.values, unit(seen_XZ.dtype)
    exact = replace(expected, rounded=torch.zeros_like(values)).slack(seen_XZ.dtype)
    size = torch.stack([(part.left @ part.right).abs() for part in parts]).sum(dim=0)
    own = (expected.roundings * size).square()
    squares = [part.left.square() @ part.right.square() for part in parts]
    for part, square in zip(parts, squares, strict=True):
        own = own + part.sums * (size.square() + square)
    inside = [p.roundings**2 * square for p, square in zip(parts, squares, strict=True)]
    weights = 1 / (own + torch.stack(inside).sum(dim=0) + (exact / u).square())
    weights = weights.nan_to_num(0.0, 0.0, 0.0)
    if alternative_XZ is None:
        difference = values
        G = weights * difference
    else:
        difference = alternative_XZ - values
        G = weights * difference
        along = (G * values).sum(dim=1) / (weights * values.square()).sum(dim=1)
        G = G - weights * values * along.nan_to_num(0.0)[:, None]
    variance, rest = (G.square() * own).sum(), (G.abs() * exact).sum()
    for part in parts:
        of_left, weights_of_left = part.variance(G)
        variance = variance + of_left
        rest = rest + (weights_of_left.abs() * part.lost).sum()
    result = torch.stack(
        [
            (G * (seen_XZ.double() - values)).sum(),
            (G * difference).sum(),
            multiplicity * u * u * variance,
            rest,
        ]
    )
    return torch.where(result.isfinite().all(), result, 0.0)


@dataclass
class Contrasts:
    """The contrasts of one product over several calls, by alternative."""

    sums: dict[str, Contrast] = field(default_factory=dict)

    def add(self, contrasts: Mapping[str, Contrast]) -> None:
        """Add those of a call."""
        for name, one in contrasts.items():
            self.sums[name] = self.sums[name] + one if name in self.sums else one

    def words(self) -> str:
        """What the results are instead of what was declared, if that can be told; empty otherwise."""
        nearest = min(self._named(), default=None)
        return "" if nearest is None else nearest[2]

    def _named(self) -> Iterator[tuple[bool, int, str]]:
        """What can be told: whether the share is far from one, a number, and words."""
        for number, (name, sums) in enumerate(self.sums.items()):
            along, size, variance, rest = sums.tolist()
            if size <= 0:
                continue
            share, noise = along / size, (LAMBDA * variance**0.5 + rest) / size
            if name == MULTIPLE:
                if abs(share) > noise + _LEAST_FACTOR:
                    words = f"it is {1 + share:.3g} times the product of its operands"
                    yield True, len(self.sums), words
            elif noise <= _MOST_NOISE and share > 0.5:
                is_far = abs(share - 1) > 0.25
                yield is_far, number, f"it is the product of {name} before quantisation"


#: The alternative that is a multiple of the expected result.
MULTIPLE = "a multiple"


def multiplicity(rows: Tensor) -> int:
    """How often the most frequent row occurs."""
    return int(torch.unique(rows.float(), dim=0, return_counts=True)[1].max()) if len(rows) else 1
