"""Quantised operands and block scales that ranks recorded in parts: the oracle quantises the whole tensor.

Every part has complete blocks here, so that quantising a part is a part of quantising the whole.

    # T tokens, I input width, O output width (gate and up of fc1)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantexp.capture import open_capture
from quantexp.capture.division import Holder
from quantexp.capture.operands import quantised_operand
from quantexp.capture.record.operand_recorder import OperandRecorder
from quantexp.capture.record.recorder import Recorder
from quantexp.capture.store.folder import CaptureStore
from quantexp.capture.store.manifest import finish_capture
from quantexp.formats import encode, quantise
from quantexp.model.layout import Layout
from quantexp.quant.hooks import same_layout
from quantexp.quant.precision import ModuleId, precision_map
from quantexp.schema import CaptureConfig, CaptureLevel, CaptureValues, Experiment, StoreKind
from tests.capture.layouts import local

T, I, O = 128, 64, 256  # noqa: E741
SHAPES = {"input": (T, 1, I), "weight": (O, I), "grad_output": (T, 1, O)}
LAYOUTS = {
    "TP2+SP": Layout(tensor=2, sequence=True),
    "CP2": Layout(context=2),
    "TP2xCP2": Layout(tensor=2, context=2),
}


@pytest.mark.parametrize("count", [0, 40])
@pytest.mark.parametrize("name", LAYOUTS)
def test_operands_and_scales_of_parts_are_those_of_the_whole(
    tiny: Callable[..., Experiment], tmp_path: Path, name: str, count: int
) -> None:
    experiment = tiny("quant=linear_mxfp4")
    precision = precision_map(experiment.model, experiment.quant)[ModuleId(0, "fc1")]
    source = torch.Generator().manual_seed(0)
    tensors = {t: torch.randn(s, generator=source).bfloat16() for t, s in SHAPES.items()}
    config = CaptureConfig(
        level=CaptureLevel.tensors, values=CaptureValues.after, sample_count=count
    )
    layout = LAYOUTS[name]
    for rank, place in layout.places():
        store = CaptureStore(tmp_path, rank, kind=StoreKind.safetensors)
        recorder = Recorder(
            config,
            store,
            rank,
            lambda _: None,
            layout.num_processes,
            holder=Holder(layout, place, 2),
        )
        recorder.hook(precision.module, lambda: precision, lambda tensor: {})
        recorder.begin(1, 0)
        recorded = OperandRecorder(recorder)
        for slot, spec in precision.slots.items():
            operand = quantised_operand(slot, spec)
            assert operand is not None
            x = local("fc1", operand.source, tensors[operand.source], layout, place).contiguous()
            values = quantise(x, spec.fmt, axis=operand.dim(x.ndim), scale_rule=spec.scale_rule)
            recorded(precision, slot, x, values, same_layout)
        recorder.flush()
        store.close()
    finish_capture(tmp_path)
    for slot, spec in precision.slots.items():
        operand = quantised_operand(slot, spec)
        assert operand is not None
        x = tensors[operand.source]
        dim = operand.dim(x.ndim)
        values = quantise(x, spec.fmt, axis=dim, scale_rule=spec.scale_rule)
        _, scales = encode(x, spec.fmt, axis=dim, scale_rule=spec.scale_rule)
        assert isinstance(scales, torch.Tensor)
        for tensor, expected in ((operand.tensor, values), (f"{operand.tensor}_scale", scales)):
            entry = open_capture(tmp_path).select(tensor=tensor)[0]
            if (sample := entry.metadata.get("sample")) is not None:
                assert count
                assert sample["shape"] == list(expected.shape)
                expected = expected.index_select(0, torch.tensor(sample["indices"]))
            assert torch.equal(entry.torch().view(expected.dtype), expected), tensor
    sampled = sum("sample" in entry.metadata for entry in open_capture(tmp_path))
    assert sampled == (12 if count else 0)
