"""The tokens of a routed expert: the sequence of each row, and their layout for blocks along tokens.

An expert's tokens are rows [n, width] in the order of the micro-batch, [T, B] flattened: neighbouring rows belong to
different sequences. A block along tokens lies within one sequence, so the product over tokens uses the layout
[L, B, width]: each sequence's rows in order, padded with zeros to the longest sequence (L rows). Zeros change no
block's amax and add nothing to the product. A single sequence needs no layout.

Under expert parallelism an expert has the tokens of several micro-batches at once, one of each source: the ranks that
share the experts, or those of them that together have one micro-batch. Sequences are numbered by source and column;
scales, random numbers and transforms are those of each source (`quantexp.quant.sources`), as if the micro-batches came
one after another.

    # n rows, S sources, B sequences of all sources, L rows of the longest sequence
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The sequence of each row of an expert."""

    #: int64 [n], each in [0, B); a source has B / S successive numbers.
    sequence: Tensor
    num_sequences: int
    #: The micro-batch of each source: how much higher its number is than that of this rank's own.
    micro_batches: tuple[int, ...] = (0,)

    @property
    def num_sources(self) -> int:
        """Micro-batches that the rows are from."""
        return len(self.micro_batches)

    @cached_property
    def _place(self) -> Tensor:
        """Each row's index within its own sequence, int64 [n]."""
        own = torch.nn.functional.one_hot(self.sequence, self.num_sequences)
        return own.cumsum(0).gather(1, self.sequence[:, None])[:, 0] - 1

    def laid_out(self, x: Tensor) -> Tensor:
        """Rows [n, width] as [L, B, width], padded with zeros; [0, B, width] if there are no rows."""
        longest = int(self._place.max()) + 1 if len(x) else 0
        result = x.new_zeros(longest, self.num_sequences, x.shape[-1])
        result[self._place, self.sequence] = x
        return result

    def of_source(self, source: int, *, is_laid_out: bool = False) -> Tensor:
        """The indices of a source's tokens among the rows, or in [L, B] flattened; int64, in order.

        Laid out they are as many for each of its sequences as the longest of these has, as if the source were alone.
        """
        each = self.num_sequences // self.num_sources
        own = self.sequence // each == source
        if not is_laid_out:
            return own.nonzero()[:, 0]
        longest = int(self._place[own].max()) + 1 if own.any() else 0
        indices = torch.arange(longest * self.num_sequences, device=own.device)
        return indices.view(longest, self.num_sequences)[
            :, source * each : (source + 1) * each
        ].flatten()
