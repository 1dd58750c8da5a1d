"""Captured quantised operands: numpy's quantisation of the tensor before, and those that were multiplied, bit for bit.

The products are repeated by the same call on the same machine with operands of the same shape and dtype, through fp32
where the run multiplied so; other operands than those that the run multiplied would give other bits somewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from quantexp.quant.products import through_fp32
from quantexp.runs.device import multiplies_natively
from quantexp.runs.paths import RunDir
from quantexp.schema import Precision

from .captured import Array, Module, Slot, read_capture
from .grids import _ELEMENTS, _blocks, _power_of_two_scale, _scale_exponent
from .oracle import DIMS, captured_operand, operand
from .test_more_schemes import FP4_OF_THE_MOMENT
from .test_schemes import MODEL

pytestmark = pytest.mark.slow

Run = Callable[..., RunDir]

#: An operand's captured tensor, and the pass of its product.
SOURCES = {
    **{"x": "input", "w": "weight", "g": "grad_output"},
    **{"q": "query", "k": "key", "v": "value"},
    **{"P": "attn_weights", "dO": "grad_output", "dS": "grad_scores"},
}
#: Stochastic rounding and a random transform in attention too, whose numbers are counted by head.
FP4_DGRAD_P = [f"quant.pv.dgrad_p.{name}={FP4_OF_THE_MOMENT}" for name in ("dO", "v")]
ONE_LAYER = [*MODEL, "model.num_layers=1"]


def operand_key(slot: str) -> tuple[str, str]:
    """(operation, tensor) of a slot's quantised operand."""
    product, _, name = slot.rpartition(".")
    product = product.rpartition(".")[2]
    return ("forward" if product == "fprop" else "backward"), f"{SOURCES[name]}_{product}"


def own_slots(module: Module) -> Iterator[tuple[str, Slot]]:
    """The slots that quantise, except for the forward's copies."""
    for slot, declared in module.formats.items():
        if declared["format"] != "bf16" and not declared["reuse"]:
            yield slot, declared


@pytest.mark.parametrize(
    "words",
    [
        ("quant=FA_linear_mxfp8",),
        ("quant=FA_linear_hifp8", "quant/pv=mxfp4"),
        ("quant=more/linear_nvfp4_recipe", "quant.rules=[]", "training.recompute=full"),
        ("quant=more/linear_fp4_ue5m3",),
        ("quant=more/linear_nvfp4_of_forward", "quant.rules=[]"),
        ("quant=more/linear_mxfp4_quartet",),
        ("quant=more/linear_mxfp4_sr_rht", *FP4_DGRAD_P),
    ],
    ids=lambda words: words[0].partition("=")[2],
)
def test_each_operand_is_its_tensor_on_the_declared_grid_under_its_scales(
    run_tiny: Run, words: tuple[str, ...]
) -> None:
    run = run_tiny(*words, *ONE_LAYER, "capture.values=both")
    modules = read_capture(run.tensors)
    assert len(modules) == 5
    for module in modules:
        expected: set[str] = set()
        for slot, declared in own_slots(module):
            key = operand_key(slot)
            what = f"{module} {slot}"
            values, line = module.tensors[key], module.lines[key]
            assert np.array_equal(values, operand(module, module.formats, slot)), what
            assert (line["values"], line["slot"]) == ("after", slot)
            assert line["source"] == SOURCES[slot.rpartition(".")[2]]
            assert DIMS[slot.rpartition(".")[2]][line["dim"]] == declared["axis"]
            expected.add(key[1])
            if declared["block"]:
                expected.add(f"{key[1]}_scale")
            if "hadamard" not in declared and not (
                "definition" in declared and not declared["block"]
            ):
                _scales_are_right(module, slot, declared)
        actual = {n for (_, n), line in module.lines.items() if line["values"] != "before"}
        assert actual == expected


def _scales_are_right(module: Module, slot: str, declared: Slot) -> None:
    key = operand_key(slot)
    name = slot.rpartition(".")[2]
    line, x = module.lines[key], captured_operand(module, name)
    if declared.get("of"):
        x = operand(module, module.formats, f"fprop.{name}")
    if declared["format"] == "hifp8":
        assert line["tensor_scale"] == 2.0 ** _power_of_two_scale(np.abs(x).max(), declared)
        return
    codes = module.tensors[key[0], f"{key[1]}_scale"]
    if "definition" in declared:
        values = np.moveaxis(module.tensors[key], line["dim"], -1)
        each = np.repeat(np.moveaxis(codes, line["dim"], -1), declared["block"], axis=-1)
        codes_of = np.abs(values / each[..., : values.shape[-1]])
        assert np.isin(codes_of, [0, 0.5, 1, 1.5, 2, 3, 4, 6]).all()
        return
    blocks = _blocks(np.moveaxis(x, line["dim"], -1), declared["block"])
    assert blocks is not None
    amax = np.moveaxis(np.abs(blocks).max(axis=-1), -1, line["dim"])
    if declared["format"] == "nvfp4_e2m1":
        t = np.float32(np.abs(x).max() / 2688.0)
        assert line["tensor_scale"] == float(t)
        b = np.clip(amax.astype(np.float32) / np.float32(6) / t, 2.0**-9, 448)
        expected: Array = b.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(np.float64)
    else:
        assert line["tensor_scale"] is None
        rule = declared["scale_rule"]
        expected = _scale_exponent(amax, _ELEMENTS[declared["format"]], rule) + 127.0
    assert np.array_equal(codes, expected), f"{module} {slot}"


class Captured:
    """The tensors of one module as torch has them."""

    def __init__(self, folder: Path, module: Module) -> None:
        self.folder, self.module = folder, module

    def __getitem__(self, name: str) -> Tensor:
        (file,) = {file for (_, n), file in self.module.files.items() if n == name}
        content: dict[str, Any] = torch.load(self.folder / file, weights_only=True)
        tensor: Tensor = content["tensor"]
        return tensor

    def __contains__(self, name: str) -> bool:
        return any(n == name for _, n in self.module.files)


@pytest.mark.parametrize("scheme", ["linear_mxfp4", "linear_hifp8"])
def test_linear_products_of_the_operands_after_quantisation_are_the_results_to_the_bit(
    run_tiny: Run, scheme: str
) -> None:
    folder = run_tiny(f"quant={scheme}", *ONE_LAYER, "capture.values=after").tensors
    layers = [m for m in read_capture(folder) if m.layer_type == "linear"]
    assert len(layers) == 4
    for module in layers:
        c = Captured(folder, module)
        assert not any(name in c for name in ("input", "weight", "grad_output"))
        with _products_of_the_run():
            y = torch.matmul(c["input_fprop"], c["weight_fprop"].t())
            dx = torch.matmul(c["grad_output_dgrad"], c["weight_dgrad"])
            g, x = c["grad_output_wgrad"], c["input_wgrad"]
            dw = torch.matmul(g.reshape(-1, g.shape[-1]).t(), x.reshape(-1, x.shape[-1]))
        assert torch.equal(y, c["output"]), module
        assert torch.equal(dx, c["grad_input"]), module
        assert torch.equal(dw, c["grad_weight"]), module


def test_attention_products_of_the_operands_after_quantisation_are_the_results_to_the_bit(
    run_tiny: Run,
) -> None:
    words = ["quant=more/FA_full_mxfp8", "quant/pv=mxfp4", "quant.pv.dgrad_p.dO.format=mxfp4"]
    folder = run_tiny(*words, *ONE_LAYER, "capture.values=after").tensors
    modules = [m for m in read_capture(folder) if m.layer_type == "attention"]
    (module,) = modules
    c = Captured(folder, module)
    with _products_of_the_run():
        P, v = c["attn_weights_fprop"], c["value_fprop"]
        B, H, T, _ = P.shape
        o = torch.bmm(P.flatten(0, 1), _by_head(v, H))
        assert torch.equal(o.view(B, H, T, -1).permute(2, 0, 1, 3).flatten(2), c["output"])
        dP = torch.bmm(_by_head(c["grad_output_dgrad_p"], H), _by_head(v, H).transpose(1, 2))
        assert torch.equal(dP.view(P.shape), c["grad_attn_weights"])
        dS = c["grad_scores_dgrad_q"].flatten(0, 1)
        k = c["key_dgrad_q"]
        assert module.softmax_scale is not None
        dq = torch.bmm(dS, _by_head(k, H)) * module.softmax_scale
        assert torch.equal(dq.view(B, H, T, -1).permute(2, 0, 1, 3), c["grad_query"])
        dS = c["grad_scores_dgrad_k"].flatten(0, 1).transpose(1, 2)
        q = c["query_dgrad_k"]
        dk = torch.bmm(dS, _by_head(q, H)) * module.softmax_scale
        dk = dk.view(B, H, T, -1).permute(2, 0, 1, 3)
        G = c["key_fprop"].shape[2]
        assert torch.equal(dk.unflatten(2, (G, -1)).sum(dim=3), c["grad_key"])


def _products_of_the_run() -> contextlib.AbstractContextManager[None]:
    return through_fp32([] if multiplies_natively(Precision.bf16) else [torch.bfloat16])


def _by_head(x_TBGD: Tensor, num_heads: int) -> Tensor:
    """[T, B, G, D] as [B H, T, D], a key-value head for each query head."""
    x_TBHD = x_TBGD.repeat_interleave(num_heads // x_TBGD.shape[2], dim=2)
    return x_TBHD.flatten(1, 2).transpose(0, 1)
