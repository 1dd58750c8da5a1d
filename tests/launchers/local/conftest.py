"""Fixtures of the queue's tests: many small experiments, and a machine on which they cost nothing."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from quantexp_launchers.local import queue, slots, sweep
from rich.console import Console

from quantexp.config.compose import compose
from quantexp.schema import Experiment

from .stand_in import Workers


@pytest.fixture(scope="session")
def composed() -> Experiment:
    return compose(["training=fast", "capture=off", "analysis.auto=false"], None, {})


@pytest.fixture
def make(composed: Experiment, tmp_path: Path) -> Callable[..., Experiment]:
    """An experiment of its own identity for each seed."""

    def one(seed: int = 1, *, scheme: str = "bf16", **launcher: object) -> Experiment:
        own = copy.deepcopy(composed)
        own.training.seed, own.quant.name = seed, scheme
        own.paths.root = str(tmp_path / "runs")
        for key, value in launcher.items():
            setattr(own.launcher, key, value)
        return own

    return one


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    """Stand-ins for real workers, on a machine with four cores and no GPU."""
    workers = Workers()
    monkeypatch.setattr(queue, "carry_out", workers)
    monkeypatch.setattr(sweep, "device_class", lambda _: "cpu")
    monkeypatch.setattr(slots, "visible_gpus", list)
    monkeypatch.setattr(slots, "allowed_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(slots.Slot, "enter", lambda _: None)
    return workers


@pytest.fixture
def console() -> Console:
    """No terminal; `output_of` returns its output."""
    return Console(file=io.StringIO(), width=160, highlight=False)
