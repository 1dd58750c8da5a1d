"""Small experiments."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from quantexp.config.compose import compose
from quantexp.schema import Experiment


@pytest.fixture(scope="module")
def composed() -> Experiment:
    return compose(["training=fast", "quant=FA_mxfp8", "model.num_layers=1"], None, {})


@pytest.fixture
def experiment(composed: Experiment, tmp_path: Path) -> Experiment:
    own = copy.deepcopy(composed)
    own.paths.root = str(tmp_path / "runs")
    return own


@pytest.fixture(scope="module")
def base() -> Experiment:
    return compose(["training=fast", "quant=FA_linear_mxfp8"], None, {})
