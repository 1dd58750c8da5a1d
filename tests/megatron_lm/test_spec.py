"""SPEC is built when it is asked for, and says what is wrong where Megatron-LM is not."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import quantexp.megatron_lm
from quantexp.errors import ConfigError
from quantexp.megatron_lm import spec
from quantexp.training.megatron import collectives
from tests.megatron_lm.arguments import llama


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


def test_a_rank_with_another_scheme_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTEXP_QUANT", "FA_mxfp8")
    monkeypatch.setattr(collectives, "gather", lambda value: [value, value])
    assert spec._agreed(llama(), "0.16.1").quant.name == "FA_mxfp8"
    monkeypatch.setattr(collectives, "gather", lambda value: [value, ("", "other")])
    with pytest.raises(
        ConfigError, match=r"the same scheme and capture on every rank; that of rank 1"
    ):
        spec._agreed(llama(), "0.16.1")
    monkeypatch.setattr(collectives, "gather", lambda value: [value, ("no such scheme", "")])
    with pytest.raises(ConfigError, match=r"^rank 1: no such scheme$"):
        spec._agreed(llama(), "0.16.1")


def test_a_refusal_is_said_on_its_own_rank_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "gather", lambda value: [value])
    with pytest.raises(ConfigError, match=r"^--fp8-format quantises nothing"):
        spec._agreed(llama(fp8="hybrid"), "0.16.1")


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match=r"'quantexp.megatron_lm' has no attribute 'SPECS'"):
        _ = quantexp.megatron_lm.SPECS
