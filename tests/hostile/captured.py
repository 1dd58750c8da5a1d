"""Synthetic captures of two ranks, written by the store's own writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quantexp.capture.names import TensorName
from quantexp.capture.report import write_report
from quantexp.capture.statistics.summary import statistics
from quantexp.capture.store.folder import CaptureStore
from quantexp.capture.store.manifest import finish_capture
from quantexp.capture.store.metadata import About
from quantexp.schema import StoreKind

MX8 = {"format": "mxfp8_e4m3", "axis": "input_width", "block": 32}


def write_capture(folder: Path, kind: StoreKind, *, ranks: int = 2, end: bool = True) -> None:
    """Two iterations of one linear layer: input and its quantised twin, weight (listed twice), output, a scale."""
    for rank in range(ranks):
        store = CaptureStore(folder, rank, kind=kind)
        generator = torch.Generator().manual_seed(rank)
        counter = rank
        for iteration in (1, 2):
            for tensor, phase, more in (
                ("input", "pre", {}),
                ("input_fprop", "pre", {"values": "after", "slot": "fprop.x", "dim": 1}),
                ("input_fprop_scale", "pre", {"values": "scale"}),
                ("weight", "pre", {}),
            ):
                name = TensorName(0, "fc1", "forward", phase, tensor, "mxfp8")
                x = torch.randn(4, 64, generator=generator).to(torch.bfloat16)
                if tensor.endswith("scale"):
                    x = torch.full((4, 2), 120, dtype=torch.uint8)
                about = About.of(_metadata(name, x, iteration, rank) | more)
                store.add(name.file("20250908_095220", counter), x, about)
                counter += ranks
                if tensor == "weight":
                    again = TensorName(0, "fc1", "backward", "pre", tensor, "mxfp8")
                    assert store.last is not None
                    store.refer(store.last, About.of(_metadata(again, x, iteration, rank)))
                store.add_statistics(about)
            store.send()
        store.flush()
        store.close()
    if end:
        finish_capture(folder)
        write_report(folder)


def _metadata(name: TensorName, x: torch.Tensor, iteration: int, rank: int) -> dict[str, Any]:
    return {
        "module": name.module,
        "layer": name.layer,
        "layer_type": name.layer_type,
        "operation": name.operation,
        "phase": name.phase,
        "component": name.component,
        "quant_type": name.quant_type,
        "tensor": name.tensor,
        "values": "before",
        "iteration": iteration,
        "micro_batch": 0,
        "rank": rank,
        "loss_scale": None,
        "shape": list(x.shape),
        "dtype": str(x.dtype).removeprefix("torch."),
        "formats": {"fprop.x": MX8},
        "statistics": statistics(x),
    }
