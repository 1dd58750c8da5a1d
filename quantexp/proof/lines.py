"""Some lines of an operand as they must be, made when that is asked for, those that are quantised alike together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantexp.formats import QuantSpec
from quantexp.proof.image import image
from quantexp.proof.products import Expected, Reference


@dataclass(eq=False)
class Lines:
    """Lines of an operand, [lines, K]."""

    #: Of the source, as they were when they were taken.
    source: Tensor
    #: What quantises them; None if they stay as they are.
    spec: QuantSpec | None = None
    #: The shape in which they are quantised, None means their own, and the dimension that blocks run along there.
    shape: tuple[int, ...] | None = None
    axis: int = -1
    #: Keywords of `image`.
    options: Mapping[str, Any] = field(default_factory=dict)
    _made: Tensor | None = None

    def __call__(self) -> Tensor:
        """What they must be."""
        if self.spec is None:
            return self.source
        if self._made is None:
            x = self.source if self.shape is None else self.source.reshape(self.shape)
            own = image(x, self.spec, self.axis, **self.options)
            self._made = own.reshape(self.source.shape)
        return self._made

    def is_like(self, other: Lines) -> bool:
        """Whether the image of both beside each other is that of each."""
        a, b = self.spec, other.spec
        if a is None or b is None or self.options or other.options:
            return False
        is_each_alone = self.axis == other.axis == -1 and self.shape is other.shape is None
        x, y = self.source, other.source
        return (
            is_each_alone
            and not a.is_transformed
            and a.fmt.across == 1
            and (x.shape[1], x.dtype) == (y.shape[1], y.dtype)
            and a.along_any_axis == b.along_any_axis
        )


def make(lines: Iterable[Lines]) -> None:
    """Make several lines; the fewer images are computed the better, as small ones take the time of their calls."""
    left = list(dict.fromkeys(lines))
    while left:
        alike = [each for each in left if each is left[0] or each.is_like(left[0])]
        left = [each for each in left if each not in alike]
        if len(alike) > 1:
            first = alike[0]
            assert first.spec is not None
            own = image(torch.cat([each.source for each in alike]), first.spec, first.axis)
            parts = torch.split(own, [len(each.source) for each in alike])
            for each, part in zip(alike, parts, strict=True):
                each._made = part


def no_elements(seen: Tensor) -> Expected:
    """What no elements must be; `seen` has none."""
    none = seen.double()
    return lambda: Reference(none, none, none)
