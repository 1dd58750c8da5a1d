"""Shared by the tests of fused and tiled attention: schemes, operands, a softmax like Megatron's, and results."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from quantexp.config.compose import compose
from quantexp.quant.attention import tiled
from quantexp.quant.attention.call import AttentionCall, no_tensor_wanted
from quantexp.quant.hooks import no_hook
from quantexp.quant.precision import ModuleId, ModulePrecision, precision_map

FULL_MXFP8 = (
    "quant=more/FA_full_mxfp8",
    "quant/pv=mxfp8",
    "quant.pv.dgrad_p.dO.format=mxfp8",
    "quant.pv.dgrad_p.v.format=mxfp8",
    "quant.pv.dgrad_v.P.format=mxfp8",
    "quant.pv.dgrad_v.dO.format=mxfp8",
)
FULL_HIFP8 = tuple(word.replace("mxfp8", "hifp8") for word in FULL_MXFP8)
SCHEMES = {
    "bf16": ("quant=bf16",),
    "mxfp8": FULL_MXFP8,
    "hifp8": FULL_HIFP8,
    "mxfp4, P again": ("quant=more/FA_full_mxfp4", "quant/pv=mxfp4"),
    "mxfp6, P again": ("quant=more/FA_full_mxfp6", "quant/pv=mxfp6"),
    "nvfp4, P again": ("quant=more/FA_full_nvfp4", "quant/pv=nvfp4"),
    "fp8, P again": ("quant=more/FA_full_fp8", "quant/pv=fp8"),
    "exact hifp8 of dS and P alone": (
        "quant=bf16",
        "quant.pv.dgrad_v.P={format: hifp8, scaling: exact}",
        "quant.qk.dgrad_k.dS={format: hifp8, scaling: exact}",
    ),
    "floor, clipped": (
        *FULL_MXFP8,
        "quant.pv.scale_rule=floor",
        "quant.pv.fprop.P.clip_gradient=true",
        "quant.pv.fprop.v.clip_gradient=true",
    ),
    "nvfp4, clipped": (
        "quant=bf16",
        "quant.pv.fprop.P={format: nvfp4, clip_gradient: true}",
    ),
    "3/4 of mxfp4": (
        "quant=bf16",
        "quant.qk.dgrad_q.dS={format: mxfp4, pre_scale: true}",
        "quant.qk.dgrad_k.dS={format: mxfp4, pre_scale: true}",
        "quant.pv.dgrad_v.P={format: mxfp4, pre_scale: true}",
    ),
    "Hadamard": (
        "quant=bf16",
        "quant.pv.fprop.P={format: hifp8, hadamard: deterministic, hadamard_block: 16}",
        "quant.pv.fprop.v={format: mxfp8, hadamard: deterministic, hadamard_block: 16}",
        "quant.qk.dgrad_k.dS={format: mxfp4, hadamard: random, hadamard_block: 64}",
        "quant.qk.dgrad_k.q={format: mxfp4, hadamard: random, hadamard_block: 64}",
        "quant.qk.dgrad_q.dS={format: hifp8, hadamard: random, hadamard_block: 8}",
        "quant.qk.dgrad_q.k={format: hifp8, hadamard: random, hadamard_block: 8}",
    ),
    "stochastic": (
        "quant=bf16",
        "quant.pv.fprop.P={format: hifp8, rounding: stochastic}",
        "quant.pv.dgrad_v.P={format: mxfp4, rounding: stochastic}",
        "quant.qk.dgrad_q.dS={format: nvfp4, rounding: stochastic}",
        "quant.qk.dgrad_k.dS={format: mxfp8, rounding: stochastic}",
    ),
    "stochastic, used again": (
        "quant=bf16",
        "quant.pv.fprop.P={format: mxfp4, rounding: stochastic}",
        "quant.pv.dgrad_v.P.format=reuse",
    ),
    "blocks of 64": (*FULL_MXFP8, "quant.qk.block=64", "quant.pv.block=64"),
}
Result = tuple[Tensor, Tensor, Tensor, Tensor]


@cache
def declared(*words: str) -> ModulePrecision:
    experiment = compose(["training=fast", *words], None, {})
    return precision_map(experiment.model, experiment.quant)[ModuleId(0, "attention")]


def operands(dtype: torch.dtype, T: int, *, E: int = 32) -> list[Tensor]:
    """B 2, H 6, G 2, D 32."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(T, 2, 6, 32), (T, 2, 2, 32), (T, 2, 2, E)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def documents(T: int) -> Tensor:
    """Causal, and tokens from 17 on do not see earlier ones; [1, 1, T, T], True where a key is hidden."""
    t = torch.arange(T)
    return ((t[None] > t[:, None]) | ((t[:, None] >= 17) & (t[None] < 17)))[None, None]


def softmax(S: Tensor, mask: Tensor | None, start: int = 0) -> Tensor:
    """Megatron's softmax: masked with -10000, float32 internally."""
    R, K = S.shape[2:]
    if mask is None:
        hidden = torch.arange(K) > torch.arange(start, start + R)[:, None]
    else:
        hidden = mask[:, :, start : start + R, :K]
    return torch.softmax(S.float().masked_fill(hidden.to(S.device), -10000.0), dim=-1).to(S.dtype)


def by_tiles(
    precision: ModulePrecision,
    qkv: list[Tensor],
    mask: Tensor | None = None,
    hook: Any = no_hook,
    *,
    is_whole: bool = False,
) -> Result:
    """o, dq, dk and dv; dO has whole numbers if `is_whole`."""
    leaves = fresh(qkv)
    o = tiled_output(precision, *leaves, mask, hook)
    return with_gradients(o, *leaves, is_whole=is_whole)


def tiled_output(
    precision: ModulePrecision,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    hook: Any = no_hook,
) -> Tensor:
    call = AttentionCall(precision, 0.2, hook, getattr(hook, "asks", no_tensor_wanted), mask)
    return tiled.attention(call, q, k, v, lambda S, start: softmax(S, mask, start))


def fresh(qkv: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    return q, k, v


def with_gradients(o: Tensor, q: Tensor, k: Tensor, v: Tensor, *, is_whole: bool = False) -> Result:
    generator = torch.Generator().manual_seed(4)
    dO = torch.randn(o.shape, generator=generator)
    o.backward((dO.round() if is_whole else dO).to(o))
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return o.detach(), q.grad, k.grad, v.grad


def far(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())
