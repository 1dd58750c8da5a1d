"""A capture folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.capture.store.folder import CaptureStore
from quantexp.capture.store.metadata import About

from .listed import value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four tensors, one of them listed twice, and one left out."""
    place = tmp_path / "run" / "tensors"
    store = CaptureStore(place)
    for i, (layer, module, name) in enumerate(
        [(0, "fc1", "input"), (0, "fc1", "weight"), (1, "attention", "query"), (1, "fc1", "output")]
    ):
        metadata = {"layer": layer, "module": module, "tensor": name, "iteration": i + 1}
        metadata |= {"operation": "forward", "quant_type": "mxfp8", "shape": [2, 3]}
        store.add(f"mxfp8/{i}.pt", value(i), About.of(metadata))
        if name == "weight":
            assert store.last is not None
            store.refer(store.last, About.of(metadata | {"operation": "backward"}))
    store.leave_out(About.of({"layer": 1, "tensor": "input", "left_out": "over capture.max_gb=1"}))
    store.close()
    return place
