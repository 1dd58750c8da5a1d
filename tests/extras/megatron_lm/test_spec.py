"""SPEC is built when it is asked for, and says what is wrong where Megatron-LM is not."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

import quantexp.megatron_lm
from quantexp.errors import ConfigError
from quantexp.extras.megatron_lm import spec
from quantexp.training.megatron import collectives
from tests.extras.megatron_lm.arguments import llama


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


def _agree(monkeypatch: pytest.MonkeyPatch, args: Any, *others: tuple[str, str]) -> None:
    monkeypatch.setattr(collectives, "gather", lambda own: [own, *(others or (own,))])
    spec._agree(*spec._composed(args, "0.16.1"))


def test_a_rank_with_another_scheme_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTEXP_QUANT", "FA_mxfp8")
    _agree(monkeypatch, llama())
    words = (
        r"^quantexp: QUANTEXP_QUANT .* the same scheme and capture on every rank; that of rank 1"
    )
    with pytest.raises(SystemExit, match=words):
        _agree(monkeypatch, llama(), ("", "other"))
    with pytest.raises(SystemExit, match=r"^quantexp: rank 1: no such scheme$"):
        _agree(monkeypatch, llama(), ("no such scheme", ""))


def test_a_refusal_is_said_on_its_own_rank_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"^quantexp: --fp8-format quantises nothing"):
        _agree(monkeypatch, llama(fp8="hybrid"), ("", "other"))


@pytest.mark.parametrize("is_connected", [True, False])
def test_ranks_compare_as_soon_as_they_are_connected(
    monkeypatch: pytest.MonkeyPatch, is_connected: bool
) -> None:
    events: list[str] = []
    training = ModuleType("megatron.training.training")
    vars(training)["initialize_megatron"] = lambda **words: events.append("connected")
    package = ModuleType("megatron.training")
    vars(package)["training"] = training
    monkeypatch.setitem(sys.modules, "megatron.training", package)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: is_connected)
    spec._when_connected(lambda: events.append("compared"))
    assert events == ["compared"] * is_connected
    training.initialize_megatron(store=None)
    assert sorted(events) == ["compared", "connected"]
    assert events[-1] == ("connected" if is_connected else "compared")


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match=r"'quantexp.megatron_lm' has no attribute 'SPECS'"):
        _ = quantexp.megatron_lm.SPECS
