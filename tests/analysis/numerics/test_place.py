from __future__ import annotations

from quantexp.analysis.numerics.place import Place


def test_what_an_old_name_does_not_say_is_left_out_of_the_label() -> None:
    place = Place.of({"layer_type": "linear", "operation": "forward", "tensor": "input"})
    assert place.label == "linear forward input"


def test_experts_are_one_kind() -> None:
    place = Place.of({"module": "expert7-fc1", "layer": 3, "tensor": "input_wgrad"})
    assert place.kind == "expert-fc1 input_wgrad"
    assert place.source == "input"
    assert not place.is_scale
    assert Place.of({"tensor": "input_wgrad_scale"}).is_scale
