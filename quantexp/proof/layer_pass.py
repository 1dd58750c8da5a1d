"""The drawn tokens of what one pass of a decoder layer shows, and the names of the modules that show it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from quantexp.proof.draws import Moment, lines

#: Linear layers and the norms whose results they multiply, by Megatron-Core's names, with ours.
AFTER_NORM = {
    "linear_qkv": ("qkv", "input_layernorm"),
    "linear_q_proj": ("q-proj", "input_layernorm"),
    "linear_q_down_proj": ("q-down", "input_layernorm"),
    "linear_kv_down_proj": ("kv-down", "input_layernorm"),
    "linear_q_up_proj": ("q-up", "q_layernorm"),
    "linear_kv_up_proj": ("kv-up", "kv_layernorm"),
}
#: The norms in messages.
NORMS = {
    "input_layernorm": "the norm before attention",
    "pre_mlp_layernorm": "the norm before the feed-forward",
    "q_layernorm": "the norm of q",
    "k_layernorm": "the norm of k",
    "kv_layernorm": "the norm of the latent",
}
#: Tokens of a pass that are compared.
TOKENS = 8


@dataclass
class Pass:
    """One forward pass of the layer, and the backward pass that follows it."""

    moment: Moment
    #: The angles of the rotary embedding, [at least T, 1, 1, D].
    angles: Tensor | tuple[Tensor, Tensor] | None
    num_sequences: int
    #: The drawn tokens of what was seen; gradients have the names of their tensors after a `d `.
    seen: dict[str, Tensor] = field(default_factory=dict)
    #: Tokens of a sequence in attention's products, which may be more than the layer's.
    num_tokens: int = 0

    def picked(self, number: int) -> Tensor:
        """The drawn ones of so many rows, or of the tokens of all sequences."""
        return lines(self.moment.choice("between"), number, 1, TOKENS)

    def drawn(self, x: Tensor) -> Tensor:
        """The drawn tokens of [T, B, ...], or the drawn rows of [rows, width]."""
        x = x.detach()
        if x.dim() == 2:
            return x[self.picked(len(x))] if len(x) else x
        T, B = x.shape[:2]
        picked = self.picked(T * B)
        return x[picked // B, picked % B]

    def drawn_angles(self, name: str) -> Tensor | None:
        """The angles of q's or k's drawn tokens, [R, 1, D]."""
        whole = self.angles[name == "k"] if isinstance(self.angles, tuple) else self.angles
        if whole is None:
            return None
        return self.drawn(whole[: self.num_tokens].expand(-1, self.num_sequences, -1, -1))
