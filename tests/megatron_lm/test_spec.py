"""SPEC is built when it is asked for, and says what is wrong where Megatron-LM is not."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import quantexp.megatron_lm
from quantexp.errors import ConfigError


def test_the_import_loads_neither_torch_nor_megatron() -> None:
    code = (
        "import quantexp.megatron_lm, sys; print(sorted({'torch', 'megatron'} & set(sys.modules)))"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "[]"


def test_outside_of_megatron_lm_the_spec_says_where_it_belongs() -> None:
    with pytest.raises(ConfigError, match=r"SPEC is for Megatron-LM's scripts.*; run pretrain_gpt"):
        _ = quantexp.megatron_lm.SPEC
    assert importlib.import_module("quantexp.megatron_lm") is quantexp.megatron_lm


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match=r"'quantexp.megatron_lm' has no attribute 'SPECS'"):
        _ = quantexp.megatron_lm.SPECS
