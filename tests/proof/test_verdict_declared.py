"""Operands in declared formats are judged by their sources; planted faults are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.formats import QuantSpec, get_format, quantise, resolve
from quantexp.formats.definitions.definition import declared_format
from quantexp.proof.grids import Status
from quantexp.proof.verdict import judge

BF16 = resolve("bf16")
KEYS: dict[str, dict[str, Any]] = {
    "blocks": {"element": "e3m3", "block": 24, "scale": "ue5m3"},
    "rows": {"element": "e4m3", "block": "row", "scale": "fp32"},
    "tiles": {"element": "e2m1", "block": [16, 16], "scale": "e4m3", "tensor_scale": "fp32"},
    "search": {"element": "int4", "block": 32, "scale": "bf16", "scale_rule": "search"},
    "list": {"element": {"values": [-1, -0.3, 0, 0.4, 1]}, "block": 16, "scale": "fp32"},
    "tensor": {"element": {"values": [-1, 0, 1]}},
    "mx": {"element": "e3m3", "block": 24},
}


def spec_of(name: str) -> QuantSpec:
    return resolve(declared_format(name, KEYS[name]))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(96, 240, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("name", KEYS)
def test_only_what_was_declared_passes(x: Tensor, name: str, axis: int) -> None:
    spec = spec_of(name)
    finding = judge(quantise(x, spec, axis=axis), spec, axis, source=x)
    assert (finding.status, finding.quantised) == (Status.ENGAGED, True)
    for other in {*KEYS, "mxfp4", "mxfp8"} - {name}:
        planted = quantise(x, spec_of(other) if other in KEYS else resolve(other), axis=axis)
        assert judge(planted, spec, axis, source=x).status is Status.MISMATCH, other
    unquantised = judge(x, spec, axis, source=x)
    assert unquantised.status is Status.MISMATCH


def test_a_mismatch_states_how_many_elements_are_off(x: Tensor) -> None:
    spec = spec_of("blocks")
    q = quantise(x, spec)
    q[3, 5] *= 1.5
    finding = judge(q, spec, -1, source=x)
    assert finding.reason == f"1 of {x.numel()} elements are not its source on the grid of blocks"


def test_a_source_on_the_grid_proves_nothing(x: Tensor) -> None:
    spec = spec_of("rows")
    ones = torch.ones_like(x)
    finding = judge(ones, spec, -1, source=ones)
    assert (finding.status, finding.reason) == (Status.INCONCLUSIVE, "on the grid anyway")


def test_without_its_source_it_is_a_mismatch(x: Tensor) -> None:
    spec = spec_of("blocks")
    finding = judge(quantise(x, spec), spec, -1)
    assert finding.status is Status.MISMATCH
    assert "its source before quantisation is missing" in finding.reason


def test_the_working_precision_is_its_source(x: Tensor) -> None:
    assert judge(x, BF16, -1, source=x).status is Status.ENGAGED
    finding = judge(quantise(x, spec_of("rows")), BF16, -1, source=x)
    assert finding.status is Status.MISMATCH
    assert finding.reason.endswith("elements are not those before quantisation")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "formats_that_are_judged"
    (tmp_path / f"{name}.py").write_text(
        "class Silent:\n"
        "    def quantise(self, x, *, axis, generator):\n"
        "        return x.sign()\n"
        "class Telling(Silent):\n"
        "    def contains(self, x, axis):\n"
        "        return x.abs() == 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_class_is_taken_at_its_word_or_declared(x: Tensor, module: str) -> None:
    silent, telling = (resolve(get_format(f"{module}:{name}")) for name in ("Silent", "Telling"))
    finding = judge(x.sign(), silent, -1, source=x)
    assert finding.status is Status.DECLARED
    assert finding.reason == "declared, cannot be proved: its class has no contains"
    assert judge(x.sign(), telling, -1, source=x).status is Status.ENGAGED
    planted = judge(x, telling, -1, source=x)
    assert planted.status is Status.MISMATCH
    assert planted.reason.endswith("by its contains")
    ones = torch.ones_like(x)
    assert judge(ones, telling, -1, source=ones).status is Status.INCONCLUSIVE
