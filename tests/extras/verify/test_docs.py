"""The documentation of `quantexp verify` lists what exists."""

from __future__ import annotations

from pathlib import Path

from quantexp.extras.verify.kernels import KERNELS
from quantexp.extras.verify.oracles import ORACLES
from quantexp.formats.certificate import State

PAGE = (Path(__file__).parents[3] / "docs" / "verify.md").read_text()


def test_every_kernel_oracle_and_state_has_its_line() -> None:
    for kernel in KERNELS:
        assert f"\n| `{kernel.name}` |" in PAGE
    for oracle in ORACLES:
        assert f"\n| {oracle} |" in PAGE
    for state in State:
        assert f"\n| `{state.value}` |" in PAGE
