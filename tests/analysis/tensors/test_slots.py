from __future__ import annotations

import pytest

from quantexp.analysis.tensors.slots import check_layout, module_of, slots_of
from quantexp.errors import CaptureError

#: Captured tensor -> slot -> the dimension its blocks run along, from the layouts in docs/captures.md: linear
#: [tokens, sequences, width], heads [tokens, sequences, heads, head_dim], P [sequences, heads, queries, keys].
TABLE = {
    ("linear", "input"): {"linear.fprop.x": -1, "linear.wgrad.x": 0},
    ("linear", "weight"): {"linear.fprop.w": -1, "linear.dgrad.w": 0},
    ("linear", "grad_output"): {"linear.dgrad.g": -1, "linear.wgrad.g": 0},
    ("attention", "query"): {"qk.fprop.q": -1, "qk.dgrad_k.q": 0},
    ("attention", "key"): {"qk.fprop.k": -1, "qk.dgrad_q.k": 0},
    ("attention", "value"): {"pv.fprop.v": 0, "pv.dgrad_p.v": -1},
    ("attention", "attn_weights"): {"pv.fprop.P": -1, "pv.dgrad_v.P": -2},
    ("attention", "grad_scores"): {"qk.dgrad_q.dS": -1, "qk.dgrad_k.dS": -2},
    ("attention", "grad_output"): {"pv.dgrad_p.dO": -1, "pv.dgrad_v.dO": 0},
}


@pytest.mark.parametrize(("layer_type", "tensor"), TABLE)
def test_a_tensor_serves_two_products_along_different_axes(layer_type: str, tensor: str) -> None:
    slots = slots_of({"layer_type": layer_type, "tensor": tensor})
    assert {str(slot): slot.dim for slot in slots} == TABLE[layer_type, tensor]


@pytest.mark.parametrize(
    ("layer_type", "tensor"),
    [("linear", "output"), ("linear", "grad_weight"), ("attention", "weight"), ("other", "input")],
)
def test_a_tensor_that_is_no_operand_has_no_slot(layer_type: str, tensor: str) -> None:
    assert slots_of({"layer_type": layer_type, "tensor": tensor}) == []


def test_left_and_right_are_the_product_s() -> None:
    sides = {
        str(s): s.is_left
        for t in ("input", "weight")
        for s in slots_of({"layer_type": "linear", "tensor": t})
    }
    assert sides == {
        "linear.fprop.x": True,
        "linear.wgrad.x": False,
        "linear.fprop.w": False,
        "linear.dgrad.w": False,
    }


@pytest.mark.parametrize(
    ("metadata", "module"),
    [
        ({"module": "fc1", "layer_type": "linear"}, "fc1"),
        ({"module": "expert12-fc2", "layer_type": "linear"}, "expert-fc2"),
        ({"module": None, "layer_type": "linear"}, "linear"),
    ],
)
def test_experts_count_as_one_module(metadata: dict[str, str], module: str) -> None:
    assert module_of(metadata) == module


@pytest.mark.parametrize(
    ("tensor", "layer_type", "shape", "layout"),
    [
        ("weight", "linear", (64,), "[output width, input width]"),
        ("input", "linear", (2, 3, 4, 5), "[tokens, sequences, width]"),
        ("grad_output", "attention", (64, 2, 64), "[tokens, sequences, heads, head_dim]"),
        ("attn_weights", "attention", (4, 64, 64), "[sequences, heads, queries, keys]"),
        ("grad_scores", "attention", (4, 64, 64), "[sequences, heads, queries, keys]"),
    ],
)
def test_another_layout_is_refused(
    tensor: str, layer_type: str, shape: tuple[int, ...], layout: str
) -> None:
    (slot, _) = slots_of({"layer_type": layer_type, "tensor": tensor})
    with pytest.raises(CaptureError) as refused:
        check_layout(shape, slot)
    assert str(refused.value) == f"must be {layout} as captured, got the shape {list(shape)}"
