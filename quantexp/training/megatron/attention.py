"""Megatron's core attention with the scheme's matrix products instead of the stock ones.

plain: the stock class's softmax, mask, scale and dropout; the scheme's two matrix products and their backward. Stores
       the full score and probability matrices.
fused: torch's fused kernel on quantised operands, if the scheme allows it (`quantexp.quant.attention.fused`).
tiled: the plain path's products and the stock softmax by tiles of queries (`quantexp.quant.attention.tiled`).
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

from quantexp.errors import ConfigError
from quantexp.quant.attention import fused, tiled
from quantexp.quant.attention.call import AttentionCall, TensorFilter, no_tensor_wanted
from quantexp.quant.attention.plain import context, scores
from quantexp.quant.hooks import FORWARD, POST, PRE, TensorHook, no_hook
from quantexp.quant.precision import ModulePrecision
from quantexp.schema import AttentionPath


class LatentCoreAttention(DotProductAttention):  # type: ignore[misc]
    """Megatron's core attention with the two arguments that latent attention passes: key and value head widths.

    The stock class lacks them; it needs only the width of value heads, which it reads from `kv_channels`.
    """

    def __init__(
        self,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        assert v_channels in (None, self.hidden_size_per_attention_head)


class SchemeAttention(LatentCoreAttention):
    """Scaled dot-product attention with the scheme's products.

    # T tokens, B sequences, H query heads, G key-value heads, D head_dim, E head_dim of values
    """

    precision: ModulePrecision
    hook: TensorHook = staticmethod(no_hook)
    #: Whether the hook needs a tensor that only the plain path stores in full.
    wants: TensorFilter = staticmethod(no_tensor_wanted)
    path: AttentionPath = AttentionPath.plain
    #: The mask of the current forward pass: True where a query must not see a key, [B, 1, T, T]; None means causal.
    mask: Tensor | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: object = None,
    ) -> Tensor:
        """The attention output [T, B, H*E] of query [T, B, H, D], key [T, B, G, D] and value [T, B, G, E].

        Raises:
            ConfigError: packed sequences or an attention bias; on the tiled path also attention dropout, a softmax
                offset or a sliding window.
        """
        if packed_seq_params is not None or attention_bias is not None:
            raise ConfigError("attention supports neither packed sequences nor a bias here")
        self.mask = attention_mask
        try:
            return self._attention(query, key, value)
        finally:
            self.mask = None

    def _attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.hook(FORWARD, PRE, "query", query)
        self.hook(FORWARD, PRE, "key", key)
        self.hook(FORWARD, PRE, "value", value)

        paths = {
            AttentionPath.plain: self._plain,
            AttentionPath.fused: self._fused,
            AttentionPath.tiled: self._tiled,
        }
        o_TBHE = paths[self.path](query, key, value, self.mask)
        output = o_TBHE.reshape(*query.shape[:2], -1)
        self.hook(FORWARD, POST, "output", output)
        return output

    def _plain(self, q_TBHD: Tensor, k_TBGD: Tensor, v_TBGE: Tensor, mask: Tensor | None) -> Tensor:
        T, B, H, _ = q_TBHD.shape
        call = self._call(mask)
        S = scores(call, q_TBHD, k_TBGD)
        P = self.scale_mask_softmax(S.view(B, H, T, T), mask, self.softmax_offset)
        with self._dropout_rng():
            P = self.attention_dropout(P)
        self.hook(FORWARD, POST, "attn_weights", P)
        o = context(call, P.reshape(B * H, T, T), v_TBGE)
        return o.view(B, H, T, -1).permute(2, 0, 1, 3)

    def _fused(self, q_TBHD: Tensor, k_TBGD: Tensor, v_TBGE: Tensor, mask: Tensor | None) -> Tensor:
        return fused.attention(self._call(mask), q_TBHD, k_TBGD, v_TBGE)

    def _tiled(self, q_TBHD: Tensor, k_TBGD: Tensor, v_TBGE: Tensor, mask: Tensor | None) -> Tensor:
        if (
            self.attention_dropout.p
            or self.softmax_offset is not None
            or self.scale_mask_softmax.window_size is not None
        ):
            raise ConfigError(
                "training.attention=tiled does not support attention dropout, a softmax offset or a sliding window; "
                "use training.attention=plain"
            )
        T, B, H, _ = q_TBHD.shape
        probabilities = partial(self._probabilities, mask)
        o = tiled.attention(self._call(mask), q_TBHD, k_TBGD, v_TBGE, probabilities)
        return o.view(B, H, T, -1).permute(2, 0, 1, 3)

    def _call(self, mask: Tensor | None) -> AttentionCall:
        return AttentionCall(self.precision, self.softmax_scale, self.hook, self.wants, mask)

    def _probabilities(self, mask: Tensor | None, S_BHRK: Tensor, start: int) -> Tensor:
        """The stock softmax of R rows of scores, starting at query `start`; causal without a mask."""
        R, K = S_BHRK.shape[2:]
        if mask is None:
            queries = torch.arange(start, start + R, device=S_BHRK.device)
            hidden = torch.arange(K, device=S_BHRK.device) > queries[:, None]
        else:
            hidden = mask[:, :, start : start + R, :K]
        P: Tensor = self.scale_mask_softmax(S_BHRK, hidden, None)
        return P

    def _dropout_rng(self) -> contextlib.AbstractContextManager[None]:
        if self.config.sequence_parallel:
            return contextlib.nullcontext()
        fork: contextlib.AbstractContextManager[None] = (
            tensor_parallel.get_cuda_rng_tracker().fork()
        )
        return fork
