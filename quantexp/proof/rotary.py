"""The angles of the rotary embedding from the configuration, in float64.

    plain      a_ti = t f_i, f_i = base^(-2i / D)
    Llama 3    f_i / factor where the wavelength 2 pi / f_i is above 8192 tokens, f_i below 2048, between them both by
               their shares
    YaRN       f_i / factor where fewer than `beta_slow` rotations fit into the original length, f_i where more than
               `beta_fast` do, between them a ramp over i (arXiv 2309.00071, section 3.2)

t is the position in the whole sequence: a context-parallel rank has two of its equal parts, one from each end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quantexp.proof.products import Reference
from quantexp.schema import ModelConfig

#: Llama 3's original length, and the tokens below which a wavelength is short.
_LONG, _SHORT = 8192, 2048


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of a model, on one of the ranks that divide its sequences."""

    model: ModelConfig
    rank: int = 0
    size: int = 1

    def angles(self, tokens: Tensor, num_own: int, device: torch.device) -> Reference:
        """The angles of some of a rank's tokens, [R, 1, D].

        In float32 a frequency is off by ln(base) last bits, as its exponent is by one, and by some more; a mixture of
        two is off by some last bits of the larger one, which is at most `factor` times the mixture.
        """
        half = torch.outer(self._positions(tokens.double(), num_own), self._frequencies).to(device)
        values = torch.cat([half, half], dim=-1)[:, None]
        yarn = None if self.model.mla is None else self.model.mla.yarn
        factor = (self.model.rope_scaling_factor or 1.0) if yarn is None else yarn.factor
        roundings = math.ceil(math.log(self.model.rotary_base) + 16 + 8 * max(factor, 1 / factor))
        return Reference(values, values.abs(), torch.zeros_like(values), 0.0, roundings)

    @property
    def magnitude(self) -> float:
        """The factor of cosine and sine."""
        yarn = None if self.model.mla is None else self.model.mla.yarn
        if yarn is None:
            return 1.0
        each = [
            0.1 * scale * math.log(yarn.factor) + 1 for scale in (yarn.mscale, yarn.mscale_all_dim)
        ]
        return each[0] / each[1]

    def _positions(self, tokens: Tensor, num_own: int) -> Tensor:
        if self.size == 1:
            return tokens
        half = num_own // 2
        from_end = (2 * self.size - 2 - self.rank) * half
        return tokens + torch.where(tokens < half, self.rank * half, from_end)

    @cached_property
    def _frequencies(self) -> Tensor:
        model, mla = self.model, self.model.mla
        width = model.head_dim if mla is None else mla.qk_pos_emb_head_dim
        places = torch.arange(width // 2, dtype=torch.float64)
        plain = model.rotary_base ** (-2 * places / width)
        if mla is not None and mla.yarn is not None:
            yarn, base = mla.yarn, 2 * math.log(model.rotary_base)

            def place(rotations: float) -> float:
                length = yarn.original_length / (rotations * 2 * math.pi)
                return width * math.log(length) / base

            first = max(math.floor(place(yarn.beta_fast)), 0)
            last: float = min(math.ceil(place(yarn.beta_slow)), width - 1)
            last += 0.001 * (first == last)
            slow = ((places - first) / (last - first)).clamp(0, 1)
            return plain * (1 - slow) + plain / yarn.factor * slow
        if mla is None and model.rope_scaling_factor is not None:
            per_length = _LONG * plain / (2 * math.pi)
            fast = ((per_length - 1) / (_LONG / _SHORT - 1)).clamp(0, 1)
            return plain * fast + plain / model.rope_scaling_factor * (1 - fast)
        return plain
