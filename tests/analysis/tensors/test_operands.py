from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quantexp.analysis.tensors.operands import (
    check_layout,
    declared_operands,
    module_of,
    operand_called,
    slots_of_tensor,
)
from quantexp.errors import CaptureError
from quantexp.formats import Hadamard, Scaling, resolve

from ..captures import BF16, HIF8, MX4, MX8, Capture, attention_formats, linear_formats  # noqa: TID252


def line(
    capture: Capture, name: str, formats: dict[str, Any], module: str = "fc1"
) -> dict[str, Any]:
    return capture.add(torch.ones(2), name, module, formats=formats)


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("input", {"x fprop": -1, "x wgrad": 0}),
        ("weight", {"w fprop": -1, "w dgrad": 0}),
        ("grad_output", {"g dgrad": -1, "g wgrad": 0}),
        ("output", {}),
        ("grad_input", {}),
    ],
)
def test_a_linear_tensor_fills_its_slots_along_their_dimensions(
    capture: Capture, name: str, slots: dict[str, int]
) -> None:
    declared = declared_operands(line(capture, name, linear_formats(MX8)))
    assert {d.slot: d.dim for d in declared} == slots


def test_a_sum_of_parts_is_no_quantisation_of_the_tensor(capture: Capture) -> None:
    formats = linear_formats(MX8)
    formats["fprop.x"] = {**formats["fprop.x"], "parts": [{"take": "mean", "along": "tokens"}]}
    declared = declared_operands(line(capture, "input", formats))
    assert [d.slot for d in declared] == ["x wgrad"]


@pytest.mark.parametrize(
    ("name", "slots"),
    [("query", ["q fprop"]), ("key", ["k fprop"]), ("value", []), ("attn_weights", [])],
)
def test_attentions_reused_and_bf16_slots_are_no_quantisation_of_their_own(
    capture: Capture, name: str, slots: list[str]
) -> None:
    declared = declared_operands(line(capture, name, attention_formats(MX8), "attention"))
    assert [d.slot for d in declared] == slots


def test_probabilities_have_keys_last_and_queries_before_them(capture: Capture) -> None:
    formats = {"pv.fprop.P": {**MX4, "axis": "keys"}, "pv.dgrad_v.P": {**MX4, "axis": "queries"}}
    declared = declared_operands(line(capture, "attn_weights", formats, "attention"))
    assert {d.slot: d.dim for d in declared} == {"P fprop": -1, "P dgrad_v": -2}


def test_gradients_of_the_scores_lie_as_the_probabilities_do(capture: Capture) -> None:
    formats = {
        "qk.dgrad_q.dS": {**MX8, "axis": "keys"},
        "qk.dgrad_k.dS": {**MX8, "axis": "queries"},
    }
    declared = declared_operands(line(capture, "grad_scores", formats, "attention"))
    assert {d.slot: d.dim for d in declared} == {"dS dgrad_q": -1, "dS dgrad_k": -2}


def test_values_have_keys_first(capture: Capture) -> None:
    formats = {"fprop.v": {**MX4, "axis": "keys"}, "dgrad_p.v": {**MX4, "axis": "head_dim"}}
    declared = declared_operands(line(capture, "value", formats, "attention"))
    assert [d.dim for d in declared] == [0, -1]


def test_options_are_those_that_the_format_has(capture: Capture) -> None:
    settings = {**MX8, "axis": "input_width", "saturate": None, "reuse": False, "future": 1}
    (declared,) = declared_operands(line(capture, "input", {"fprop.x": settings}))
    assert declared.spec == resolve("mxfp8", block=32, scale_rule="rceil", rounding="even")
    assert declared.format.name == "mxfp8_e4m3"


def test_the_draw_signs_and_amax_of_a_slot_are_read(capture: Capture) -> None:
    settings = {
        **MX4,
        "rounding": "stochastic",
        "seed": 2**63,
        "offset": 2**32,
        "pre_scale": True,
        "hadamard": "random",
        "hadamard_block": 4,
        "signs": [1, -1, 1, 1],
        "axis": "tokens",
    }
    (declared,) = declared_operands(line(capture, "input", {"wgrad.x": settings}))
    spec = resolve("mxfp4", scale_rule="floor", rounding="stochastic", pre_scale=True)
    assert declared.spec == replace(spec, hadamard=Hadamard.RANDOM, hadamard_block=4)
    assert declared.draw == {"seed": 2**63, "offset": 2**32}
    assert declared.signs == (1, -1, 1, 1)
    delayed = {**HIF8, "scaling": "delayed", "window": 2, "amax": 3.5}
    (declared,) = declared_operands(line(capture, "input", {"fprop.x": delayed}))
    assert declared.amax == 3.5


def test_a_format_without_blocks_needs_no_axis(capture: Capture) -> None:
    (declared,) = declared_operands(line(capture, "input", {"fprop.x": HIF8}))
    assert declared.dim == -1
    assert declared.spec.scaling is Scaling.CURRENT


def test_an_axis_may_be_a_number(capture: Capture) -> None:
    (declared,) = declared_operands(line(capture, "input", {"fprop.x": {**MX4, "axis": 1}}))
    assert declared.dim == 1


def test_a_bf16_run_has_no_quantised_operand(capture: Capture) -> None:
    assert declared_operands(line(capture, "input", linear_formats(BF16))) == []


def test_attentions_grad_output_is_another_operand_than_a_linear_layers() -> None:
    assert operand_called("attention", "grad_output") == "dO"
    assert operand_called("linear", "grad_output") == "g"
    assert operand_called("linear", "output") is None


def test_an_unknown_format_is_refused_by_its_slot(capture: Capture) -> None:
    formats = {"fprop.x": {"format": "fp3", "axis": "tokens"}}
    with pytest.raises(CaptureError, match=r"slot fprop.x of the manifest: unknown number format"):
        declared_operands(line(capture, "input", formats))


def test_an_unknown_axis_is_refused_with_the_known_ones(capture: Capture) -> None:
    formats = {"fprop.x": {**MX8, "axis": "width"}}
    with pytest.raises(CaptureError, match=r"axis must be one of input_width, .*, got 'width'"):
        declared_operands(line(capture, "input", formats))


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
    slots = slots_of_tensor({"layer_type": layer_type, "tensor": tensor})
    assert {str(slot): slot.dim for slot in slots} == TABLE[layer_type, tensor]


@pytest.mark.parametrize(
    ("layer_type", "tensor"),
    [("linear", "output"), ("linear", "grad_weight"), ("attention", "weight"), ("other", "input")],
)
def test_a_tensor_that_is_no_operand_has_no_slot(layer_type: str, tensor: str) -> None:
    assert slots_of_tensor({"layer_type": layer_type, "tensor": tensor}) == []


def test_left_and_right_are_the_product_s() -> None:
    sides = {
        str(s): s.is_left
        for t in ("input", "weight")
        for s in slots_of_tensor({"layer_type": "linear", "tensor": t})
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
    (slot, _) = slots_of_tensor({"layer_type": layer_type, "tensor": tensor})
    with pytest.raises(CaptureError) as refused:
        check_layout(shape, slot)
    assert str(refused.value) == f"must be {layout} as captured, got the shape {list(shape)}"
