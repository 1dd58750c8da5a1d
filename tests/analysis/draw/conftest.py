"""Captures of a few small tensors, and old collections without a manifest."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from quantexp.analysis.draw.arguments import Request
from quantexp.analysis.draw.verb import Outcome, draw
from quantexp.analysis.measures.counted import CountedTensor, count_values
from quantexp.capture.reader import CapturedTensor

from ..captures import HIF8, MX4, MX8, Capture, linear_formats  # noqa: TID252

Draw = Callable[..., tuple[Outcome, list[str], str]]
Look = Callable[..., CountedTensor]


class Unhashed(Capture):
    """Manifest lines without a hash, as other programs write them."""

    def add(self, *values: Any, **more: Any) -> dict[str, Any]:
        line = super().add(*values, **more)
        line["hash"] = None
        self.write()
        return line


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """bf16 from a standard normal distribution."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture
def run(tmp_path: Path) -> Unhashed:
    """A run with an input, a weight and a gradient of two layers."""
    capture = Unhashed(tmp_path / "llama32-1b_wikipedia_FA_linear_mxfp8-1a2b3c4d")
    formats = linear_formats(MX8)
    for layer in range(2):
        capture.add(normal(64, 96, seed=layer), "input", "fc1", layer, formats=formats)
        capture.add(normal(64, 96, seed=layer + 2), "weight", "fc1", layer, formats=formats)
        capture.add(
            normal(64, 64, seed=layer + 4) * 1e-5, "grad_output", "fc1", layer, formats=formats
        )
    capture.add_config()
    capture.add_metrics([3.5, 3.4])
    return capture


@pytest.fixture
def draws(tmp_path: Path) -> Draw:
    """`draw` in this process: the outcome, its complaints, and the printed text."""

    def do(*folders: Path | str, **request: Any) -> tuple[Outcome, list[str], str]:
        complaints: list[str] = []
        console = Console(file=io.StringIO(), width=200)
        arguments = {"out": tmp_path / "draw", "formats": ("png",), "jobs": 1, **request}
        outcome = draw(Request([str(f) for f in folders], **arguments), console, complaints.append)
        assert isinstance(console.file, io.StringIO)
        return outcome, complaints, console.file.getvalue()

    return do


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """Saves a tensor as a capture and counts its values."""

    def do(x: torch.Tensor, **metadata: Any) -> CountedTensor:
        return count_values(stored(tmp_path, x, **metadata))

    return do


def stored(folder: Path, x: object, **metadata: Any) -> CapturedTensor:
    """A file as the manifest lists it."""
    file = f"{len(list(folder.glob('*.pt')))}.pt"
    torch.save({"tensor": x, "metadata": {}}, folder / file)
    about = {"file": file, "tensor": "input", "layer_type": "linear", "quant_type": "mxfp8"}
    return CapturedTensor.of(folder, {**about, **metadata})


def old_name(counter: int, tensor: str, layer: int = 0) -> str:
    """A name of nine parts."""
    return f"20250908_095220_{counter:04d}_linear_L{layer}-fc1_forward_pre_linear_mxfp8_{tensor}.pt"


__all__ = ["HIF8", "MX4", "MX8", "linear_formats"]
