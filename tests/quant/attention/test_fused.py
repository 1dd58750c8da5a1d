"""Attention by torch's fused kernel: the plain path's result and gradients, and refusals.

In float32 both paths round every product and the softmax to 24 bits; for sums of some tens of products of numbers near
1 the relative error stays below 1e-5. In bfloat16 the plain path rounds S, P, dP and dS to 8 bits in between, each by
up to 2^-9, and the fused path does not: the root mean square of their difference stays below 4 of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.config.compose import compose
from quantexp.errors import ConfigError
from quantexp.quant.attention import fused
from quantexp.quant.attention.call import AttentionCall, no_tensor_wanted
from quantexp.quant.attention.fusable import obstacles, require_fused
from quantexp.quant.attention.plain import context, scores
from quantexp.quant.hooks import hook_operands, no_hook
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.step_state import StepState, use_step_state

from .kernels.tiled_cases import (
    Result,
    declared,
    documents,
    far,
    fresh,
    operands,
    softmax,
    with_gradients,
)

FUSABLE = ["bf16", "FA_mxfp8", "FA_mxfp4", "FA_hifp8", "linear_mxfp8", "FA_linear_mxfp4"]
#: Tokens: the last block along keys is short.
T = 40


@pytest.fixture(autouse=True)
def _moment() -> Iterator[None]:
    with use_step_state(StepState(1)) as state:
        state.begin(1, 0)
        yield


class Looks:
    """Stores the tensors that a hook receives."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[str, str, str], Tensor] = {}

    def __call__(self, operation: str, phase: str, name: str, tensor: Tensor, /) -> None:
        self.tensors[operation, phase, name] = tensor

    def asks(self, operation: str, name: str) -> bool:
        return True


def plain(
    precision: ModulePrecision, qkv: list[Tensor], mask: Tensor | None, hook: Any = no_hook
) -> Result:
    """The plain path with Megatron's softmax, in float32 internally."""
    q, k, v = fresh(qkv)
    T, B, H, _ = q.shape
    call = AttentionCall(precision, 0.2, hook)
    S = scores(call, q, k).view(B, H, T, T)
    P = softmax(S, mask)
    hook("forward", "post", "attn_weights", P)
    o = context(call, P.reshape(B * H, T, T), v)
    return with_gradients(o.view(B, H, T, -1).permute(2, 0, 1, 3), q, k, v)


def by_kernel(
    precision: ModulePrecision, qkv: list[Tensor], mask: Tensor | None, hook: Any = no_hook
) -> Result:
    q, k, v = fresh(qkv)
    call = AttentionCall(precision, 0.2, hook, getattr(hook, "asks", no_tensor_wanted), mask)
    return with_gradients(fused.attention(call, q, k, v), q, k, v)


@pytest.mark.parametrize("scheme", FUSABLE)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 4 * 2**-9)])
@pytest.mark.parametrize("by_documents", [False, True])
def test_agrees_with_the_plain_path(
    scheme: str, dtype: torch.dtype, most: float, by_documents: bool
) -> None:
    mask = documents(T) if by_documents else None
    precision = declared(f"quant={scheme}")
    for one, other in zip(
        by_kernel(precision, operands(dtype, T), mask),
        plain(precision, operands(dtype, T), mask),
        strict=True,
    ):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert far(one, other) < most


def test_quantisation_changes_more_than_the_path() -> None:
    of_scheme, of_bf16 = declared("quant=FA_mxfp4"), declared("quant=bf16")
    qkv = operands(torch.float32, T)
    for one, other in zip(
        by_kernel(of_scheme, qkv, None), by_kernel(of_bf16, qkv, None), strict=True
    ):
        assert far(one, other) > 0.01


def test_value_heads_may_be_narrower_than_key_heads() -> None:
    precision, qkv = declared("quant=FA_mxfp8"), operands(torch.float32, T, E=16)
    ours = by_kernel(precision, qkv, None)
    assert ours[0].shape == (40, 2, 6, 16)
    for one, other in zip(ours, plain(precision, qkv, None), strict=True):
        assert far(one, other) < 1e-5


def test_quantised_values_are_multiplied_both_ways() -> None:
    precision = declared("quant=FA_mxfp8", "quant/pv=mxfp8", *V_ALONE)
    qkv = operands(torch.float32, T)
    for one, other in zip(
        by_kernel(precision, qkv, None), plain(precision, qkv, None), strict=True
    ):
        assert far(one, other) < 1e-5


V_ALONE = [
    "quant.pv.fprop.P.format=bf16",
    "quant.pv.dgrad_v.P.format=bf16",
]


@pytest.mark.parametrize("scheme", ["bf16", "FA_mxfp8"])
def test_tensors_inside_the_kernel_are_captured_too(scheme: str) -> None:
    precision = declared(f"quant={scheme}")
    ours, theirs = Looks(), Looks()
    by_kernel(precision, operands(torch.float32, T), documents(T), ours)
    plain(precision, operands(torch.float32, T), documents(T), theirs)
    assert (
        ours.tensors.keys()
        == theirs.tensors.keys()
        >= {
            ("forward", "post", "attn_weights"),
            ("backward", "pre", "grad_scores"),
            ("backward", "post", "grad_attn_weights"),
            ("backward", "pre", "grad_output"),
            ("backward", "post", "grad_query"),
        }
    )
    for key, tensor in ours.tensors.items():
        assert tensor.shape == theirs.tensors[key].shape, key
        assert far(tensor, theirs.tensors[key]) < 1e-5, key


def test_unrequested_tensors_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_probabilities", None)
    looks = Looks()
    monkeypatch.setattr(looks, "asks", no_tensor_wanted)
    by_kernel(declared("quant=FA_mxfp8"), operands(torch.bfloat16, T), None, looks)
    assert {name for _, _, name in looks.tensors} == {
        "grad_output",
        "grad_query",
        "grad_key",
        "grad_value",
    }


def test_operands_reach_hooks_as_they_are_multiplied() -> None:
    calls: list[tuple[str, str]] = []

    def hook(precision: Any, slot: Any, *rest: Any) -> None:
        calls.append((slot.product.value, slot.operand))

    with hook_operands(hook):
        by_kernel(declared("quant=FA_mxfp8"), operands(torch.bfloat16, T), None)
    assert calls == [("fprop", "q"), ("fprop", "k"), ("fprop", "v")]


@pytest.mark.parametrize("scheme", FUSABLE)
def test_shipped_schemes_are_accepted(scheme: str) -> None:
    require_fused(declared(f"quant={scheme}"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quant=more/FA_full_mxfp8"], r"cannot hold .*qk.dgrad_q.dS as mxfp8_e4m3: the kernel"),
        (["quant=bf16", "quant/pv=mxfp8"], r"cannot hold .*pv.fprop.P as mxfp8_e4m3"),
        (
            ["quant=FA_mxfp8", "quant.qk.dgrad_q.k.format=bf16"],
            r"cannot hold .*qk.dgrad_q.k as the working precision, which its forward is not in",
        ),
    ],
)
def test_slots_that_the_kernel_cannot_quantise_are_refused(words: list[str], message: str) -> None:
    assert list(obstacles(declared(*words)))
    with pytest.raises(ConfigError, match=message):
        compose(["training=fast", "training.attention=fused", *words], None, {})
