"""Synthetic captures of two ranks, written by the store's own writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quantexp.capture.names import TensorName
from quantexp.capture.parts import Part
from quantexp.capture.report import write_report
from quantexp.capture.statistics.summary import statistics
from quantexp.capture.store.folder import CaptureStore
from quantexp.capture.store.manifest import finish_capture
from quantexp.capture.store.metadata import About
from quantexp.model.shards import Shard
from quantexp.schema import StoreKind

MX8 = {"format": "mxfp8_e4m3", "axis": "input_width", "block": 32}


def write_capture(
    folder: Path, kind: StoreKind, *, ranks: int = 2, end: bool = True, divided: bool = False
) -> None:
    """Two iterations of one linear layer: input and its quantised twin, a scale, weight (listed twice).

    If they are divided, each rank has its rows of each of them.
    """
    for rank in range(ranks):
        store = CaptureStore(folder, rank, kind=kind)
        generator = torch.Generator().manual_seed(rank)
        counter = rank
        for iteration in (1, 2):
            more: dict[str, Any]
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
                if divided:
                    rows = Shard(0, ((4 * rank, 4 * rank + 4),))
                    part = Part((4 * ranks, *x.shape[1:]), (rows,))
                    more = {**more, "data_rank": 0, "shard": part.record()}
                about = About.of(_metadata(name, x, iteration, rank) | more)
                store.add(name.file("20250908_095220", counter), x, about)
                counter += ranks
                if tensor == "weight":
                    assert store.last is not None
                    store.refer(store.last, about.with_more(operation="backward"))
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
