"""The tokens of a routed expert: which sequence each row is of, and their layout for blocks along tokens.

An expert's tokens are rows [n, width] in the order of the micro-batch, [T, B] flattened: neighbouring rows are of
different sequences. A block along tokens lies within one sequence, so for the product over tokens the rows are laid out
as [L, B, width], each sequence's rows one below the other in their order, and zeros below those down to the longest
(L rows). Zeros change no block's amax and add nothing to the product. One sequence needs no layout.

    # n rows, B sequences, L rows of the sequence with the most
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Of which sequence each row of an expert is."""

    #: int64 [n], each in [0, B).
    sequence: Tensor
    num_sequences: int

    @cached_property
    def _place(self) -> Tensor:
        """Each row's place among those of its own sequence, int64 [n]."""
        own = torch.nn.functional.one_hot(self.sequence, self.num_sequences)
        return own.cumsum(0).gather(1, self.sequence[:, None])[:, 0] - 1

    def laid_out(self, x: Tensor) -> Tensor:
        """Rows [n, width] as [L, B, width], filled up with zeros; [0, B, width] where there are none."""
        longest = int(self._place.max()) + 1 if len(x) else 0
        result = x.new_zeros(longest, self.num_sequences, x.shape[-1])
        result[self._place, self.sequence] = x
        return result
