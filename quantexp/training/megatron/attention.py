"""Megatron's core attention with the scheme's matrix products instead of the stock ones.

plain: the stock class's softmax, mask, scale and dropout; the scheme's two matrix products and their backward. Stores
       the full score and probability matrices.
fused: torch's fused kernel on quantised operands, if the scheme allows it (`quantexp.quant.attention.fused`).
tiled: the plain path's products and the stock softmax by tiles of queries (`quantexp.quant.attention.tiled`).

Under context parallelism a rank has some tokens of each sequence; plain and tiled attention gather the keys and values
of all ranks (`quantexp.quant.attention.context_parallel`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from quantexp.errors import ConfigError
from quantexp.formats.types import Delta
from quantexp.quant.attention import fused, tiled
from quantexp.quant.attention.call import AttentionCall, TensorFilter, no_tensor_wanted
from quantexp.quant.attention.context_parallel import SequenceShare
from quantexp.quant.attention.plain import context, scores
from quantexp.quant.attention.row_sums import Exponentials, OutputSums, with_output_sums
from quantexp.quant.hooks import FORWARD, POST, PRE, TensorHook, no_hook
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.sites import FPROP_P
from quantexp.schema import AttentionPath


class LatentCoreAttention(DotProductAttention):  # type: ignore[misc]
    """Megatron's core attention with the two arguments that latent attention passes: key and value head widths.

    The stock class lacks them; it needs only the width of value heads, which it reads from `kv_channels`, where
    Megatron-LM's script has another number. It also refuses context parallelism, which the scheme's products handle
    themselves, so its constructor does not see it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        whole = copy.copy(config)
        whole.context_parallel_size = 1
        if v_channels is not None:
            whole.kv_channels = v_channels
        super().__init__(whole, *args, **kwargs)
        self.config = config


class SchemeAttention(LatentCoreAttention):
    """Scaled dot-product attention with the scheme's products.

    # T tokens, B sequences, H query heads, G key-value heads, D head_dim, E head_dim of values
    """

    precision: ModulePrecision
    scale_mask_softmax: FusedScaleMaskSoftmax
    hook: TensorHook = staticmethod(no_hook)
    #: Whether the hook needs a tensor that only the plain path stores in full.
    wants: TensorFilter = staticmethod(no_tensor_wanted)
    path: AttentionPath = AttentionPath.plain
    #: The mask of the current forward pass: True where a query must not see a key, [B, 1, T, T], of whole
    #: sequences also under context parallelism; None means causal.
    mask: Tensor | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        softmax = SchemeSoftmax.__new__(SchemeSoftmax)
        softmax.__dict__ = self.scale_mask_softmax.__dict__
        self.scale_mask_softmax = softmax
        self.exponentials = Exponentials()

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
            ConfigError: packed sequences or an attention bias; on the tiled and the fused path, and with options of
                the softmax, also attention dropout, a softmax offset or a sliding window; on the fused path context
                parallelism.
        """
        if packed_seq_params is not None or attention_bias is not None:
            raise ConfigError("attention supports neither packed sequences nor a bias here")
        self.mask = attention_mask
        try:
            return self._attention(query, key, value)
        finally:
            self.mask = None

    def _attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if (
            self.attention_dropout.p
            or self.softmax_offset is not None
            or self.scale_mask_softmax.window_size is not None
        ):
            lacks = "does not support attention dropout, a softmax offset or a sliding window"
            if self.path is not AttentionPath.plain:
                raise ConfigError(
                    f"training.attention={self.path.value} {lacks}; use training.attention=plain"
                )
            if not self.precision.spec(FPROP_P).softmax.is_stock:
                raise ConfigError(
                    f"quant.{FPROP_P} with unnormalised or delta {lacks}; remove these options"
                )
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
        S = scores(call, q_TBHD, k_TBGD).view(B, H, T, -1)
        mask = call.mask
        if call.share is not None and mask is None:
            mask = call.share.hidden(T, slice(T), S.device)
        declared, exponentials = call.precision.spec(FPROP_P).softmax, None
        delta = OutputSums() if declared.delta is Delta.O else None
        P = self.scale_mask_softmax(S, mask, self.softmax_offset, delta)
        with self._dropout_rng():
            P = self.attention_dropout(P)
        self.hook(FORWARD, POST, "attn_weights", P)
        if declared.unnormalised:
            E, sums = self.exponentials(S, mask, declared.max_factor)
            self.hook(FORWARD, POST, "exp_scores", E)
            exponentials = E.view(B * H, T, -1), sums.view(B * H, T, 1)
        o = context(call, P.reshape(B * H, T, -1), v_TBGE, exponentials, delta)
        return o.view(B, H, T, -1).permute(2, 0, 1, 3)

    def _fused(self, q_TBHD: Tensor, k_TBGD: Tensor, v_TBGE: Tensor, mask: Tensor | None) -> Tensor:
        if self.config.context_parallel_size > 1:
            raise ConfigError(
                "training.attention=fused cannot share a sequence between ranks, got parallel.context="
                f"{self.config.context_parallel_size}: its kernel's causal mask takes query i for token i; use "
                "training.attention=tiled or plain"
            )
        return fused.attention(self._call(mask), q_TBHD, k_TBGD, v_TBGE)

    def _tiled(self, q_TBHD: Tensor, k_TBGD: Tensor, v_TBGE: Tensor, mask: Tensor | None) -> Tensor:
        T, B, H, _ = q_TBHD.shape
        call = self._call(mask)
        functions = partial(self._probabilities, call, T), partial(self._exponentials, call, T)
        o = tiled.attention(call, q_TBHD, k_TBGD, v_TBGE, *functions)
        return o.view(B, H, T, -1).permute(2, 0, 1, 3)

    def uses_kernels(self, query: Tensor, value: Tensor) -> bool:
        """Whether Triton kernels compute the attention of these tensors."""
        if self.path is not AttentionPath.tiled:
            return False
        return tiled.kernels_for(self._call(None), query, value) is not None

    def _call(self, mask: Tensor | None) -> AttentionCall:
        share = _share(self.config.context_parallel_size)
        if share is not None and mask is not None:
            mask = share.own_rows(mask, 2)
        return AttentionCall(self.precision, self.softmax_scale, self.hook, self.wants, mask, share)

    def _probabilities(
        self,
        call: AttentionCall,
        num_queries: int,
        S_BHRK: Tensor,
        start: int,
        delta: OutputSums | None = None,
    ) -> Tensor:
        """The stock softmax of R rows of scores, starting at query `start`; causal without a mask."""
        hidden = _hidden(call, num_queries, S_BHRK, start)
        P: Tensor = self.scale_mask_softmax(S_BHRK, hidden, None, delta)
        return P

    def _exponentials(
        self, call: AttentionCall, num_queries: int, S_BHRK: Tensor, start: int
    ) -> tuple[Tensor, Tensor]:
        """exp(S - m) of R rows of scores, and the row sums."""
        hidden = _hidden(call, num_queries, S_BHRK, start)
        factor = call.precision.spec(FPROP_P).softmax.max_factor
        result: tuple[Tensor, Tensor] = self.exponentials(S_BHRK, hidden, factor)
        return result

    def _dropout_rng(self) -> contextlib.AbstractContextManager[None]:
        if self.config.sequence_parallel:
            return contextlib.nullcontext()
        fork: contextlib.AbstractContextManager[None] = (
            tensor_parallel.get_cuda_rng_tracker().fork()
        )
        return fork


class SchemeSoftmax(FusedScaleMaskSoftmax):  # type: ignore[misc]
    """Megatron's softmax, whose derivative may take delta from dO and o."""

    def forward(
        self,
        S_BHRK: Tensor,
        mask: Tensor | None,
        softmax_offset: Tensor | None = None,
        delta: OutputSums | None = None,
    ) -> Tensor:
        """P of scores; with `delta` the scores stay unmasked."""
        if delta is None:
            P: Tensor = super().forward(S_BHRK, mask, softmax_offset)
            return P
        with torch.no_grad():
            P = super().forward(S_BHRK.clone(), mask, softmax_offset)
        return with_output_sums(S_BHRK, P, mask, delta)


def _hidden(call: AttentionCall, num_queries: int, S_BHRK: Tensor, start: int) -> Tensor:
    """True where the queries of a tile do not see a key."""
    R, K = S_BHRK.shape[2:]
    if call.mask is not None:
        return call.mask[:, :, start : start + R, :K]
    if call.share is not None:
        return call.share.hidden(num_queries, slice(start, start + R), S_BHRK.device)
    queries = torch.arange(start, start + R, device=S_BHRK.device)
    return torch.arange(K, device=S_BHRK.device) > queries[:, None]


def _share(num_ranks: int) -> SequenceShare | None:
    """This rank's part of each sequence; None if it is the whole."""
    if num_ranks == 1:
        return None
    group = parallel_state.get_context_parallel_group()

    def all_gather(x: Tensor) -> Sequence[Tensor]:
        parts = [torch.empty_like(x) for _ in range(num_ranks)]
        torch.distributed.all_gather(parts, x, group=group)
        return parts

    def all_reduce(x: Tensor) -> Tensor:
        torch.distributed.all_reduce(x, group=group)
        return x

    return SequenceShare(group.rank(), num_ranks, all_gather, all_reduce)
