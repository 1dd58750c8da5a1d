"""A backend that needs Transformer Engine on a machine without it, or with a broken one."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from quantexp.errors import RunError
from quantexp.schema import Backend, Experiment
from quantexp.training.megatron import backend as module
from quantexp.training.megatron.backend import scheme_spec
from quantexp.training.megatron.linear import SchemeColumnParallelLinear
from quantexp.training.megatron.without_te import require_te

Tiny = Callable[..., Experiment]


def test_the_emulation_needs_no_transformer_engine(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "require_te", None)
    spec = scheme_spec(tiny().model)
    (qkv,) = {layer.submodules.self_attention.submodules.linear_qkv for layer in spec.layer_specs}
    assert qkv is SchemeColumnParallelLinear


@pytest.mark.parametrize("name", ["transformer_engine", "te_emulated"])
def test_transformer_engine_that_is_not_installed_is_named_with_the_remedy(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    experiment = tiny()
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(RunError) as caught:
        scheme_spec(experiment.model, Backend(name))
    assert str(caught.value) == (
        f"quant.backend={name} needs Transformer Engine, which is not installed: pip install 'quantexp[te]'"
    )


def test_transformer_engine_that_is_broken_is_named_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: object())
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(RunError) as caught:
        require_te("quant.backend=te_emulated")
    assert str(caught.value) == (
        "quant.backend=te_emulated needs Transformer Engine, which cannot be imported here (hidden earlier in this "
        "process): pip install 'quantexp[te]'"
    )
