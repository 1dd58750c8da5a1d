"""Metadata of a tensor: created once, with the values of the moment of capture."""

from __future__ import annotations

import json
from typing import Any

import torch

from quantexp.capture.names import TensorName
from quantexp.capture.statistics.summary import summarise
from quantexp.capture.store.deferred import Deferred
from quantexp.capture.store.metadata import About, Describer
from quantexp.quant.precision import ModuleId, ModulePrecision

FC1 = ModuleId(0, "fc1")
NAME = TensorName(0, "fc1", "forward", "pre", "input", "bf16")


def test_metadata_is_created_once_on_demand() -> None:
    calls = list[int]()

    def make() -> dict[str, Any]:
        calls.append(1)
        return {"layer": 3}

    about = About(make)
    assert not calls
    about.finish()
    assert about.made() == about.resolved == {"layer": 3}
    assert about.line() == b'{"layer":3}\n'
    assert calls == [1]


def test_a_line_has_statistics_and_numbers_of_a_device_as_json_values() -> None:
    x = torch.tensor([1.0, 3.0])
    about = About.of({"scale": torch.tensor(0.5), "statistics": Deferred(x)})
    line = json.loads(about.line({"file": None}))
    assert line == {"scale": 0.5, "statistics": summarise(x).record(), "file": None}
    assert list(line)[-1] == "file"
    assert json.loads(About.of({}).line({"file": "a"})) == {"file": "a"}
    assert json.loads(About.of({"a": 1}).line({})) == {"a": 1}


def test_pending_bytes_count_until_the_statistics_are_counted() -> None:
    pending = Deferred(torch.ones(8))
    about = About.of({"statistics": pending})
    assert about.deferred is pending
    assert about.held_bytes == 32
    about.finish()
    assert about.held_bytes == 0
    counted = About.of({"statistics": summarise(torch.ones(8))})
    assert (counted.deferred, counted.held_bytes) == (None, 0)


def test_metadata_can_be_extended_for_the_same_statistics() -> None:
    pending = Deferred(torch.ones(8))
    about = About.of({"layer": 1, "statistics": pending})
    more = about.with_more(left_out="why")
    assert more.made() == {"layer": 1, "statistics": pending, "left_out": "why"}
    assert more.deferred is pending
    assert "left_out" not in about.made()


def test_a_tensor_is_described_by_the_micro_batch_it_passed_in() -> None:
    describer, x = Describer(rank=2), torch.zeros(4, 6, dtype=torch.bfloat16)
    passed = list[str]()
    describer.more[FC1] = lambda tensor: {"seen": [*passed, tensor]}
    precision = ModulePrecision(FC1, {})
    describer.begin(7, 1, 256.0)
    about = describer.about(NAME, precision, x, summarise(x))
    describer.begin(8, None, None)
    passed.append("later")
    whole = describer.about(NAME, precision, x, summarise(x), {"values": "after", "dim": 0})
    assert about.resolved == {
        **{"module": "fc1", "layer": 0, "layer_type": "linear", "operation": "forward"},
        **{"phase": "pre", "component": "linear", "quant_type": "bf16", "tensor": "input"},
        **{"values": "before", "iteration": 7, "micro_batch": 1, "rank": 2, "loss_scale": 256.0},
        **{"shape": [4, 6], "dtype": "bfloat16", "seen": ["input"], "formats": {}},
        "statistics": summarise(x).record(),
    }
    fields = {key: whole.resolved[key] for key in ("values", "dim", "iteration", "micro_batch")}
    assert fields == {"values": "after", "dim": 0, "iteration": 8, "micro_batch": None}
    assert whole.resolved["seen"] == ["later", "input"]
