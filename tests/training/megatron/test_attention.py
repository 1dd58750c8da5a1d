"""Attention in the model: the tiled path gives the plain path's tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from quantexp.capture import open_capture
from quantexp.capture.reader import CapturedTensor
from quantexp.errors import ConfigError
from quantexp.quant.attention import tiles
from quantexp.runs.paths import RunDir
from quantexp.schema import AttentionPath
from quantexp.training.megatron.attention import SchemeAttention
from tests.quant.attention.kernels.tiled_cases import declared

RunTiny = Callable[..., RunDir]
FULL = (
    "quant=more/FA_full_hifp8",
    "quant/pv=mxfp8",
    "quant.pv.dgrad_v.P.format=mxfp8",
    "quant.pv.dgrad_v.dO.format=mxfp8",
)


def _which(entry: CapturedTensor) -> tuple[int, str, str]:
    return entry.metadata["layer"], entry.metadata["operation"], entry.metadata["tensor"]


def losses(run: RunDir) -> list[float]:
    return [json.loads(line)["loss"] for line in run.metrics.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "extra"),
    [
        ("llama32-1b", ("dataset.mask_documents=true", "training.recompute=full")),
        ("deepseek2_lite", ()),
    ],
)
def test_tiles_give_the_plain_paths_tensors(
    run_tiny: RunTiny,
    tiny_models: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    extra: tuple[str, ...],
) -> None:
    """The forward pass is bit-identical, and so are the last layer's gradients except those of keys and values.

    These, and all gradients that depend on them, are summed in another order. The differences are far below one
    rounding of every element to bfloat16, 2^-9.
    """
    monkeypatch.setattr(tiles, "ROWS", 32)
    captures: list[dict[tuple[int, str, str], CapturedTensor]] = []
    run_losses: list[list[float]] = []
    for path in ("plain", "tiled"):
        run = run_tiny(
            *tiny_models[model],
            *FULL,
            *extra,
            f"training.attention={path}",
            "training.seq_length=96",
            "training.iterations=1",
            "training.warmup_iterations=0",
            "capture.attn_weights=true",
            "capture.values=both",
        )
        run_losses.append(losses(run))
        capture = open_capture(run.tensors)
        captures.append({_which(e): e for e in capture.select(module="attention")})
    theirs, ours = captures
    assert run_losses[0] == run_losses[1]
    assert ours.keys() == theirs.keys()
    names = {name for _, _, name in ours}
    assert {"attn_weights_fprop", "grad_scores_dgrad_q", "grad_attn_weights", "grad_query"} <= names
    last = max(layer for layer, _, _ in ours)
    for key, entry in ours.items():
        layer, operation, name = key
        one, other = entry.torch(), theirs[key].torch()
        if operation == "forward" or (layer == last and name not in ("grad_key", "grad_value")):
            assert torch.equal(one, other), key
        else:
            distance = (one.double() - other.double()).norm() / other.double().norm()
            assert float(distance) < 2**-9, key
        assert entry.metadata["attention"] == "tiled"
        assert "attention" not in theirs[key].metadata


@pytest.mark.parametrize("path", [AttentionPath.tiled, AttentionPath.fused])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_dropout", nn.Dropout(0.1)),
        ("softmax_offset", torch.zeros(4)),
        ("scale_mask_softmax", SimpleNamespace(window_size=(8, 0))),
    ],
)
def test_tiles_and_the_fused_kernel_reject_what_they_do_not_have(
    name: str, value: Any, path: AttentionPath
) -> None:
    module = SchemeAttention.__new__(SchemeAttention)
    nn.Module.__init__(module)
    module.path = path
    module.attention_dropout = nn.Dropout(0.0)
    module.softmax_offset = None
    module.scale_mask_softmax = SimpleNamespace(window_size=None)
    setattr(module, name, value)
    q = torch.zeros(4, 1, 2, 8)
    words = (
        f"attention={path.value} does not support attention dropout, a softmax offset or a sliding"
    )
    with pytest.raises(ConfigError, match=words):
        module(q, q, q, None)


@pytest.mark.parametrize("words", ["quant.pv.unnormalised=true", "quant.pv.delta=o"])
def test_rows_that_are_divided_later_reject_dropout(words: str) -> None:
    module = SchemeAttention.__new__(SchemeAttention)
    nn.Module.__init__(module)
    module.precision = declared("quant=bf16", words)
    module.attention_dropout, module.softmax_offset = nn.Dropout(0.1), None
    module.scale_mask_softmax = SimpleNamespace(window_size=None)
    q = torch.zeros(4, 1, 2, 8)
    with pytest.raises(ConfigError) as caught:
        module(q, q, q, None)
    assert str(caught.value) == (
        "quant.pv.fprop.P with unnormalised or delta does not support attention dropout, a softmax offset or a sliding "
        "window; remove these options"
    )
