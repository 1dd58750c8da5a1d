"""Manifests of captured statistics, as a run with capture=stats writes them."""

from __future__ import annotations

import json
from typing import Any

import torch

from quantexp.capture.statistics.fidelity import chosen_for
from quantexp.capture.statistics.summary import statistics
from quantexp.folders import written_beside
from quantexp.runs.paths import RunDir

#: Operation, module and tensor of a layer, in the order of capture.
TENSORS = (
    ("forward", "qkv", "input"),
    ("forward", "attention", "query"),
    ("forward", "fc2", "output"),
    ("backward", "fc2", "grad_output"),
    ("backward", "qkv", "grad_input"),
)


def line(
    operation: str,
    module: str,
    tensor: str,
    layer: int,
    iteration: int = 1,
    **more: Any,
) -> dict[str, Any]:
    """A line of the manifest."""
    return {
        "file": None,
        "module": module,
        "layer": layer,
        "layer_type": "attention" if module == "attention" else "linear",
        "operation": operation,
        "phase": "pre",
        "component": "linear",
        "quant_type": "mxfp8",
        "tensor": tensor,
        "iteration": iteration,
        "micro_batch": 0,
        "rank": 0,
        "shape": [64, 2, 32],
        "dtype": "bfloat16",
        "bytes": 0,
        "hash": None,
        "formats": {},
        **more,
    }


def captured(
    run: RunDir,
    layers: int = 2,
    iterations: tuple[int, ...] = (1,),
    fmt: str | None = "mxfp8",
    tensors: tuple[tuple[str, str, str], ...] = TENSORS,
) -> list[dict[str, Any]]:
    """Write the statistics of every tensor of every layer; the scale of a tensor grows with its layer."""
    generator = torch.Generator().manual_seed(3)
    lines = []
    for iteration in iterations:
        for layer in range(layers):
            for operation, module, tensor in tensors:
                x = torch.randn(64, 2, 32, generator=generator) * 2.0**layer
                chosen = None if fmt is None else chosen_for(fmt, tensor)
                numbers = statistics(x.bfloat16(), chosen)
                lines.append(line(operation, module, tensor, layer, iteration, statistics=numbers))
    write(run, lines)
    return lines


def write(run: RunDir, lines: list[dict[str, Any]]) -> None:
    """Write the manifest; whoever reads it meanwhile reads all of it, before or after."""
    run.tensors.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    with written_beside(run.tensors / "manifest.jsonl") as part:
        part.write_text(text)
