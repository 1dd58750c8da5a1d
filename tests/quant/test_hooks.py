"""Operands are passed to registered hooks, for as long as they are registered."""

from __future__ import annotations

from typing import Any

import torch

from quantexp.quant.hooks import hook_operands, is_operand_hooked
from quantexp.quant.linear import fprop, wgrad
from quantexp.quant.precision import ModuleId, precision_map
from quantexp.quant.sites import WGRAD_G, WGRAD_X, Slot
from quantexp.schema import ModelConfig, QuantConfig

MODEL = ModelConfig(
    num_layers=1,
    hidden_size=8,
    ffn_hidden_size=3,
    num_attention_heads=1,
    num_query_groups=1,
    head_dim=8,
)


def test_operands_of_each_product_reach_a_hook_only_in_its_context() -> None:
    declared = precision_map(MODEL, QuantConfig())[ModuleId(0, "fc1")]
    x, w = torch.randn(4, 1, 8), torch.randn(6, 8)
    calls: list[tuple[str, str, bool]] = []

    def hook(precision: Any, slot: Slot, *tensors: Any) -> None:
        source, quantised, layout = tensors
        is_same = quantised is source and layout(quantised) is quantised
        calls.append((slot.product.value, slot.operand, is_same))

    fprop(declared, x, w)
    with hook_operands(hook):
        fprop(declared, x, w)
        wgrad(declared, torch.randn(4, 1, 6), x)
    fprop(declared, x, w)
    names = [("fprop", "x"), ("fprop", "w"), ("wgrad", "g"), ("wgrad", "x")]
    assert calls == [(*name, True) for name in names]


def test_a_hook_receives_all_operands_unless_it_selects_some() -> None:
    declared = precision_map(MODEL, QuantConfig())[ModuleId(0, "fc1")]

    def hook(*operand: Any) -> None:
        pass

    def is_hooked(slot: Slot) -> bool:
        return is_operand_hooked(declared, slot)

    assert not is_hooked(WGRAD_X)
    with hook_operands(hook, lambda precision, slot: slot == WGRAD_G):
        assert is_hooked(WGRAD_G)
        assert not is_hooked(WGRAD_X)
        with hook_operands(hook):
            assert is_hooked(WGRAD_X)
        assert not is_hooked(WGRAD_X)
    assert not is_hooked(WGRAD_G)
