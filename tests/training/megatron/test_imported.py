"""Importing Megatron without torch's compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from quantexp.training.megatron.imported import compiling_on_first_call

PROGRAM = """
import sys
from quantexp.training.megatron.imported import import_megatron
import_megatron()
import quantexp.training.megatron.trainer
print('torch._inductor' in sys.modules)
"""


def test_trainer_loads_no_compiler() -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


def test_functions_are_compiled_once_and_only_if_called(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, dict[str, bool]]] = []

    def noted(function: object, **options: bool) -> object:
        compiled.append((function.__name__, options))  # type: ignore[attr-defined]
        return function

    monkeypatch.setattr(torch, "compile", noted)
    with compiling_on_first_call():

        @torch.compile
        def double(x: int) -> int:
            return 2 * x

        @torch.compile(dynamic=True)
        def half(x: int) -> int:
            return x // 2

    assert torch.compile is noted  # type: ignore[comparison-overlap]
    assert compiled == []
    assert (double(3), double(4), half(8)) == (6, 8, 4)
    assert compiled == [("double", {}), ("half", {"dynamic": True})]
