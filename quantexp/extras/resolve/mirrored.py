"""The format of the control `noise`: rounding errors with random signs (see `quantexp.extras.resolve.noise`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantexp.formats import quantise


class Mirrored:
    """x plus or minus the error of rounding x; a format in Python, of which subclasses name the format."""

    #: The format whose errors it has, and its options.
    fmt: str
    options: Mapping[str, object]

    def quantise(self, x: Tensor, *, axis: int, generator: torch.Generator) -> Tensor:
        """x - Q(x) and Q(x) - x are as likely; NaN and Inf stay, and so does a value that the format has."""
        rounded = quantise(x, self.fmt, axis=axis, **self.options).float()  # type: ignore[arg-type]
        bits = torch.randint(0, 2, x.shape, generator=generator, device=x.device)
        mirrored = torch.where(bits.bool(), rounded, 2 * x.float() - rounded)
        return torch.where(x.isfinite(), mirrored, x.float()).to(x.dtype)
