from __future__ import annotations

import pytest

from quantexp.analysis.tensors.inventory import Kind, experts_as_one, in_flow, kind_of


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
