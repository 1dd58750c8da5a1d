"""The drawn tokens of what one pass of a decoder layer shows."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from quantexp.proof.draws import Moment, lines

#: Tokens of a pass that are compared.
TOKENS = 8


@dataclass(frozen=True)
class Pass:
    """One forward pass of the layer, and the backward pass that follows it."""

    moment: Moment
    #: The angles of the rotary embedding, [T, 1, 1, D].
    angles: Tensor | tuple[Tensor, Tensor] | None
    num_sequences: int
    #: The drawn tokens of what was seen; gradients have the names of their tensors after a `d `.
    seen: dict[str, Tensor] = field(default_factory=dict)

    def drawn(self, x: Tensor) -> Tensor:
        """The drawn tokens of [T, B, ...], or the drawn rows of [rows, width]."""
        x, chosen = x.detach(), self.moment.choice("between")
        if x.dim() == 2:
            return x[lines(chosen, len(x), 1, TOKENS)] if len(x) else x
        T, B = x.shape[:2]
        picked = lines(chosen, T * B, 1, TOKENS)
        return x[picked // B, picked % B]
