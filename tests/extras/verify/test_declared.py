"""`quantexp verify` holds declared formats against exact arithmetic, and finds planted faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.cli.main import main
from quantexp.errors import VerifyError
from quantexp.extras.verify import declared
from quantexp.extras.verify import verification as verb
from quantexp.extras.verify.declared import verify_declared
from quantexp.extras.verify.suite import place
from quantexp.extras.verify.tally import Row, Tally
from quantexp.formats.declared import arithmetic, levels
from quantexp.formats.definitions.definition import declared_format
from quantexp.formats.definitions.files import shipped_formats
from quantexp.formats.types import Element, Rounding

Captured = pytest.CaptureFixture[str]
#: One of each element, block, scale and rule.
KEYS: list[dict[str, Any]] = [
    {"element": "e3m3", "block": 24, "scale": "ue5m3"},
    {"element": "hif8", "block": 16},
    {"element": "int4", "block": 16, "scale": "bf16", "scale_rule": "search"},
    {"element": "e2m1", "block": 16, "scale_rule": "search"},
    {"element": "e2m1", "block": 16, "scale": "e4m3", "scale_rule": "ceil", "tensor_scale": "power_of_two"},
    {"element": "e2m1", "block": 16, "scale": "e4m3", "scale_rule": "floor"},
    {"element": "e2m1", "block": 16, "scale": "e4m3", "candidates": [6, 4], "tensor_scale": "fp32", "amax_target": 99},
    {"element": "int4", "block": 8, "scale": "fp32", "candidates": [7, 6.5, 8.75], "choose": "max"},
    {"element": "e2m1", "block": 16, "scale": "bf16", "scale_rule": "ceil", "candidates": [4, 6], "choose": "mae"},
    {"element": "e2m1", "block": 16, "scale": "ue5m3", "scale_rule": "search", "choose": "max"},
    {"element": {"values": [-1, -0.7, -0.3, 0, 0.2, 0.5, 1.1]}, "block": 20, "scale": "fp32"},
    {"element": {"values": [-1, 1]}, "block": 8, "scale": "fp32"},
    {"element": {"integer_bits": 4, "symmetric": False}, "block": 32},
    {"element": {"exponent_bits": 8, "mantissa_bits": 3, "infinity": True}, "block": 32},
    {"element": "e4m3", "block": "row", "scale": "fp32"},
    {"element": "e3m0", "block": 8, "scale_rule": "rceil"},
    {"element": "e3m2"},
    {"element": "hif8", "scale": "power_of_two"},
    {"element": {"values": [0, 1, 3]}},
    {"element": {"exponent_bits": 4, "mantissa_bits": 3, "bias": 8, "nan": True, "negative_zero": False}},
    {"element": "e5m4", "block": 32, "scale_rule": "even"},
    {"element": "int3", "block": [4, 8], "scale_rule": "ceil"},
    {"element": ["e2m1", "int4", "hif8"], "block": [4, 8], "scale": "e4m3", "choose": "max"},
    {"element": ["e2m1", "int4"], "block": 16, "scale": "fp32", "candidates": [4, 6]},
    {"element": "e2m1", "block": 24, "scale": "e4m3", "micro_exponents": [12, 4, 2], "tensor_scale": "fp32"},
    {"element": "int4", "block": 16, "micro_exponents": [2]},
    {"element": ["e2m1", "int4"], "block": 8, "scale": "bf16", "eden": 24},
    {"element": "e4m3", "block": 8, "scale": "fp32", "eden": 16},
    {"element": "e2m1", "block": 16, "scale": "e4m3", "tensor_scale": "fp32", "macro_block": "row"},
    {"element": ["e2m1", "int4"], "block": 8, "tensor_scale": "power_of_two", "macro_block": 24},
    {"element": "e2m1", "block": 4, "scale": "e4m3", "tensor_scale": "fp32", "macro_block": 32, "eden": 8},
    {"element": "int4", "block": 8, "scale": "ue5m3", "eden": 16, "scale_rule": "search"},
]  # fmt: skip


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer elements of each case."""
    monkeypatch.setattr(declared, "_MOST", 256)
    monkeypatch.setattr(declared, "DTYPES", ("bfloat16",))


def rows(keys: dict[str, Any]) -> list[Row]:
    tally = Tally()
    verify_declared(declared_format("own", keys), place(["cpu"]), tally, lambda *_: None)
    return tally.rows


@pytest.mark.slow
@pytest.mark.parametrize("keys", KEYS, ids=str)
def test_every_kind_of_definition_is_exact(keys: dict[str, Any]) -> None:
    assert rows(keys)
    assert [row for row in rows(keys) if row.mismatches or row.cases < 10_000] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", shipped_formats())
def test_every_shipped_format_is_exact(name: str) -> None:
    tally = Tally()
    verify_declared(shipped_formats()[name], place(["cpu"]), tally, lambda *_: None)
    assert tally.rows
    assert tally.mismatches == 0


@pytest.mark.usefixtures("few")
def test_compiled_code_is_compared_where_it_takes_the_format() -> None:
    compiled = rows({"element": "e3m2", "block": 4, "scale_rule": "rceil"})
    assert [row.kernel for row in compiled] == ["reference (cpu)", "compiled (cpu)"]
    assert all(not row.mismatches and row.cases for row in compiled)
    assert [row.kernel for row in rows({"element": "hif8", "block": 6})] == ["reference (cpu)"]


@pytest.mark.usefixtures("few")
def test_a_wrong_tie_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    true = arithmetic.rounded

    def away(v: Tensor, element: Element, rounding: Rounding, random: Tensor | None) -> Tensor:
        return true(v, element, Rounding.AWAY if rounding is Rounding.EVEN else rounding, random)

    monkeypatch.setattr(levels, "rounded", away)
    row, compiled = rows({"element": "e2m1", "block": 8, "scale": "ue5m3"})
    assert row.mismatches
    assert not compiled.mismatches
    assert "even" in row.examples[0].request


@pytest.mark.usefixtures("few")
def test_a_wrong_scale_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    true = arithmetic.block_factors

    def one_ulp_up(*arguments: Any) -> Tensor:
        d = true(*arguments)
        return torch.nextafter(d, torch.full_like(d, torch.inf))

    monkeypatch.setattr(levels, "block_factors", one_ulp_up)
    row, compiled = rows({"element": "e2m1", "block": 8, "scale": "fp32"})
    assert row.mismatches
    assert not compiled.mismatches


@pytest.mark.usefixtures("few")
def test_a_file_is_verified_by_its_path(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "e2m0_b4.yaml"
    file.write_text("element: e2m0\nblock: 4\nscale: ue3m2\n")
    assert main(["verify", str(file), f"paths.cache={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "e2m0_b4" in out
    assert "no certificate: only e2m0_b4" in out


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(VerifyError, match=r"there is no file .*none\.yaml"):
        verb.declared_in([tmp_path / "none.yaml"])
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("element: q\n")
    with pytest.raises(VerifyError, match=r"wrong\.yaml: element must be a name"):
        verb.declared_in([wrong])
    taken = tmp_path / "mxint8.yaml"
    taken.write_text("element: int8\n")
    with pytest.raises(VerifyError, match=r"mxint8\.yaml has the name of a format of quantexp"):
        verb.declared_in([taken])
