"""Tiny captures, written as a run writes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.capture.store.folder import CaptureStore
from quantexp.capture.store.metadata import About

Write = Callable[..., Path]

#: tokens, sequences, heads, head_dim; the linear modules are twice as wide.
T, B, H, D = 64, 2, 2, 32
BACKWARD = ("grad_output", "grad_input")


def metadata_of(module: str, tensor: str, layer: int, quant_type: str) -> dict[str, Any]:
    """The metadata of a captured tensor."""
    backward = tensor in BACKWARD
    return {
        "module": module,
        "layer": layer,
        "layer_type": "attention" if module == "attention" else "linear",
        "operation": "backward" if backward else "forward",
        "phase": "pre",
        "quant_type": quant_type,
        "tensor": tensor,
        "iteration": 1,
        "micro_batch": 0,
        "rank": 0,
        "formats": {},
    }


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """bf16 from a standard normal distribution."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (values * scale).to(torch.bfloat16)


def linear(layer: int = 0) -> dict[tuple[str, str, int], Tensor]:
    """The operands of one linear module."""
    return {
        ("fc1", "input", layer): normal(T, B, 64, seed=layer),
        ("fc1", "weight", layer): normal(96, 64, seed=layer + 10, scale=0.02),
        ("fc1", "grad_output", layer): normal(T, B, 96, seed=layer + 20, scale=2.0**-14),
    }


def attention(layer: int = 0) -> dict[tuple[str, str, int], Tensor]:
    """The operands of one attention module."""
    heads = {n: normal(T, B, H, D, seed=layer + i) for i, n in enumerate(("query", "key", "value"))}
    weights = torch.softmax(normal(B, H, T, T, seed=layer + 7).float(), -1).to(torch.bfloat16)
    named = {**heads, "attn_weights": weights, "grad_output": normal(T, B, H, D, seed=layer + 9)}
    return {("attention", name, layer): x for name, x in named.items()}


def write_capture(
    folder: Path, tensors: dict[tuple[str, str, int], Tensor], quant_type: str = "bf16"
) -> Path:
    """Write tensors, by module, name and layer, as the capture of a run; returns the folder."""
    store = CaptureStore(folder)
    for number, ((module, tensor, layer), x) in enumerate(tensors.items()):
        metadata = metadata_of(module, tensor, layer, quant_type)
        metadata["shape"] = list(x.shape)
        store.add(f"{quant_type}/{number}_{module}_{tensor}.pt", x, About.of(metadata))
    store.close()
    return folder


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write_capture` into a run's folder."""
    return partial(write_capture, tmp_path / "run" / "tensors")
