from __future__ import annotations

import torch

from quantexp.analysis.tensors.collection import Record

from ..captures import MX8, Capture, linear_formats  # noqa: TID252


def test_a_record_has_what_its_line_says(capture: Capture) -> None:
    line = capture.add(torch.ones(4, 8), "input", "fc1", 3, formats=linear_formats(MX8))
    record = Record.from_metadata(line)
    assert record.file == line["file"]
    assert record.shape == (4, 8)
    assert (record.module, record.layer, record.operation) == ("fc1", 3, "forward")
    assert record.formats["wgrad.x"]["axis"] == "tokens"
    assert record.label == "fc1 L3 forward input"


def test_fields_of_later_versions_are_ignored(capture: Capture) -> None:
    line = capture.add(torch.ones(2), "input")
    assert Record.from_metadata(line | {"colour": "blue"}) == Record.from_metadata(line)


def test_what_an_old_name_does_not_say_is_empty() -> None:
    record = Record.from_metadata({"layer_type": "linear", "tensor": "input", "file": "a.pt"})
    assert (record.module, record.layer, record.formats) == ("linear", -1, {})
    assert record.label == "linear  input"
