"""A stand-in for SLURM, and points that are submitted to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from quantexp_launchers.slurm import submit
from quantexp_launchers.slurm.batch import Batch
from rich.console import Console

from quantexp.config.compose import compose
from quantexp.schema import Experiment

QUIET = Console(quiet=True)


class Slurm:
    """Stands in for SLURM: notes the requests and answers with numbers."""

    def __init__(self) -> None:
        self.checked: list[Batch] = []
        self.sent: list[Batch] = []
        self.cancelled: list[str] = []
        #: Called with every batch before it is accepted.
        self.on_submit: Callable[[Batch], object] = lambda _: None

    def check_batch(self, batch: Batch) -> None:
        self.checked.append(batch)

    def submit_batch(self, batch: Batch) -> list[str]:
        self.on_submit(batch)
        self.sent.append(batch)
        number = 100 + len(self.sent)
        return [f"{number}_{task}" for task in range(len(batch.runs))]

    def run_client(self, words: list[str]) -> str:
        self.cancelled.append(words[-1])
        return ""


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    stand_in = Slurm()
    monkeypatch.setattr(submit, "require_slurm", lambda: None)
    monkeypatch.setattr(submit, "max_array_size", lambda: 3)
    for name in ("check_batch", "submit_batch", "run_client"):
        monkeypatch.setattr(submit, name, getattr(stand_in, name))
    return stand_in


@pytest.fixture(scope="module")
def composed() -> Experiment:
    return compose(["training=fast", "launcher=slurm"], None, {})


Point = Callable[..., tuple[Experiment, int]]


@pytest.fixture
def point(composed: Experiment, tmp_path: Path) -> Point:
    """An experiment of its own seed, with keys of the launcher changed, and its stage."""

    def make(seed: int = 1, stage: int = 0, **launcher: Any) -> tuple[Experiment, int]:
        experiment = replace(
            composed,
            paths=replace(composed.paths, root=str(tmp_path / "runs")),
            training=replace(composed.training, seed=seed),
            launcher=replace(composed.launcher, **launcher),
        )
        return experiment, stage

    return make
