from __future__ import annotations

import pytest
import torch

from quantexp.analysis.collection import read_manifest
from quantexp.analysis.inventory import Kind, in_flow, kind_of, module_of, tally

from .captures import Capture


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
def test_a_tensors_name_tells_its_kind(capture: Capture, name: str, kind: Kind) -> None:
    capture.add(torch.ones(2), name)
    assert kind_of(read_manifest(capture.dir)[0]) is kind


def test_all_experts_are_one_module(capture: Capture) -> None:
    for module in ("expert0-fc1", "expert17-fc1", "shared-fc1"):
        capture.add(torch.ones(2), "input", module)
    modules = [module_of(r) for r in read_manifest(capture.dir)]
    assert modules == ["expert-fc1", "expert-fc1", "shared-fc1"]


def test_modules_follow_the_forward_pass() -> None:
    given = [
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
    assert in_flow(given) == expected
    assert in_flow(["attention", "qkv"]) == ["qkv", "attention"]


def test_a_shared_weight_counts_once_in_the_forward_pass(capture: Capture) -> None:
    w = torch.ones(10)
    line = capture.add(w, "weight")
    capture.add(w, "weight", file=line["file"])
    capture.add(torch.ones(5).to(torch.bfloat16), "grad_output")
    tallies = tally(read_manifest(capture.dir), lambda r: r.operation)
    assert tallies["forward"][Kind.WEIGHT].num_bytes == 40
    assert tallies["forward"][Kind.WEIGHT].num_tensors == 1
    assert list(tallies["backward"]) == [Kind.GRADIENT]
    assert tallies["backward"][Kind.GRADIENT].num_bytes == 10


def test_records_without_a_file_are_not_counted(capture: Capture) -> None:
    capture.add(torch.ones(10), "weight")["file"] = None
    capture.write()
    assert tally(read_manifest(capture.dir), lambda r: r.operation) == {}
