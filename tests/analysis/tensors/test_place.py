from __future__ import annotations

import pytest
import torch

from quantexp.analysis.tensors.place import Kind, Place, experts_as_one, in_flow, kind_of

from ..captures import Capture  # noqa: TID252


def test_a_place_has_the_values_of_its_line(capture: Capture) -> None:
    line = capture.add(torch.ones(4, 8), "input", "fc1", 3)
    place = Place.of(line)
    assert (place.module, place.layer, place.operation) == ("fc1", 3, "forward")
    assert place.label == "fc1 L3 forward input"
    assert Place.of(line | {"colour": "blue"}) == place


def test_the_label_leaves_out_what_an_old_name_lacks() -> None:
    place = Place.of({"layer_type": "linear", "operation": "forward", "tensor": "input"})
    assert place.label == "linear forward input"
    assert (place.module, place.layer, place.iteration, place.rank) == ("linear", -1, 0, 0)


def test_output_layer_has_its_name_for_a_number() -> None:
    place = Place(module="output", layer=16, operation="forward", tensor="input")
    assert place.label == "output forward input"
    assert [place.layer_label, Place(layer=3).layer_label, Place().layer_label] == [
        *("output", "3", "?")
    ]


def test_experts_are_one_kind() -> None:
    place = Place.of({"module": "expert7-fc1", "layer": 3, "tensor": "input_wgrad"})
    assert place.kind == "expert-fc1 input_wgrad"
    assert place.source == "input"
    assert not place.is_scale
    assert Place.of({"tensor": "input_wgrad_scale"}).is_scale


def test_a_tensor_of_several_ranks_has_the_place_of_its_data_parallel_rank() -> None:
    """Its first rank depends on the stage, so runs of unlike layouts could not be compared by it."""
    line = {"layer_type": "linear", "tensor": "input", "rank": 6}
    assert Place.of(line | {"data_rank": 1}).rank == 1
    assert Place.of(line).rank == 6


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("query", Kind.ATTENTION),
        ("input", Kind.ACTIVATION),
        ("weight", Kind.WEIGHT),
        ("output", Kind.ACTIVATION),
        ("attn_weights", Kind.PROBABILITY),
        ("grad_output", Kind.GRADIENT),
        ("grad_attn_weights", Kind.GRADIENT),
        ("main_grad", Kind.GRADIENT),
        ("resid_mid", Kind.ACTIVATION),
        ("grad_resid_mid", Kind.GRADIENT),
        ("input_wgrad", Kind.ACTIVATION),
        ("weight_dgrad", Kind.WEIGHT),
        ("attn_weights_dgrad_v", Kind.PROBABILITY),
        ("grad_output_dgrad_p", Kind.GRADIENT),
        ("key_dgrad_q", Kind.ATTENTION),
        ("grad_output_dgrad_scale", Kind.SCALE),
    ],
)
def test_a_tensors_name_determines_its_kind(name: str, kind: Kind) -> None:
    assert kind_of(name) is kind


def test_all_experts_are_one_module() -> None:
    modules = map(experts_as_one, ("expert0-fc1", "expert17-fc1", "shared-fc1"))
    assert list(modules) == ["expert-fc1", "expert-fc1", "shared-fc1"]


def test_modules_follow_the_forward_pass() -> None:
    modules = [
        "fc2",
        "router",
        "expert-fc1",
        "fc1",
        "proj",
        "kv-up",
        "attention",
        "kv-down",
        "q",
        "q",
    ]
    expected = ["q", "kv-down", "kv-up", "attention", "proj", "expert-fc1", "fc1", "fc2", "router"]
    assert in_flow(modules) == expected
    assert in_flow(["attention", "qkv"]) == ["qkv", "attention"]
