"""Results follow from the captured operands where ranks stored the tensors in parts, too.

The capture of one process is divided as the ranks of a layout would have stored it. Bounds are those of `test_schemes`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quantexp.model.layout import Layout
from quantexp.runs.paths import RunDir
from tests.capture.layouts import divide

from .bounds import share_outside
from .captured import read_capture
from .oracle import ATTENTION, LINEAR
from .test_schemes import MODEL

LAYOUTS = {
    "TP2+SP": Layout(tensor=2, sequence=True),
    "CP2": Layout(context=2),
    "TP2+SPxCP2": Layout(tensor=2, sequence=True, context=2),
}


@pytest.fixture(scope="module")
def run(run_tiny_once: Callable[..., RunDir]) -> RunDir:
    return run_tiny_once("quant=FA_linear_mxfp8", *MODEL, "model.num_layers=1")


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_results_follow_from_reassembled_operands(run: RunDir, tmp_path: Path, name: str) -> None:
    divide(run.tensors, tmp_path, LAYOUTS[name], num_query_groups=2)
    modules = read_capture(tmp_path)
    assert [str(module) for module in modules] == [str(each) for each in read_capture(run.tensors)]
    assert len(modules) == 5
    for module in modules:
        for key, recompute in (LINEAR if module.layer_type == "linear" else ATTENTION).items():
            captured, right = module.tensors[key], recompute(module, module.formats)
            assert captured.shape == right.nominal.shape, (str(module), key)
            assert share_outside(captured, right, module.dtype) == 0, (str(module), key)
