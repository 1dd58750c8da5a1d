"""Whole runs on several ranks: child processes with Transformer Engine's Python that train together over gloo."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from quantexp.capture.reader import open_capture
from quantexp.config.compose import compose
from quantexp.formats.torch_internals import TCPStore
from quantexp.launch.attempt import open_run
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import Rank, outcome_of_ranks
from quantexp.runs.status import State
from tests.conftest import TINY
from tests.extras.transformer_engine.rank.child import Child


@dataclass(frozen=True)
class Ran:
    """What a run left behind."""

    #: Why it failed; None if it completed.
    reason: str | None
    #: Loss, gradient norm and held-out loss of each iteration.
    metrics: list[tuple[float, float, float | None]]
    #: The content of precision.json.
    precision: dict[str, Any]
    root: Path

    @property
    def statuses(self) -> set[tuple[str, str]]:
        """Status and reason of every slot, over all ranks."""
        return {(entry["status"], entry["reason"]) for entry in self.precision["entries"]}

    def captured(self) -> dict[tuple[object, ...], Tensor]:
        """The captured tensors by what they are, joined from the parts of all ranks."""
        keys = ("layer", "module", "operation", "phase", "tensor", "iteration", "micro_batch")
        return {
            tuple(each.metadata.get(key) for key in keys): each.torch()
            for each in open_capture(self.root).with_values()
        }


class Ranks:
    """Runs of as many ranks as there are children."""

    def __init__(self, children: Sequence[Child], folder: Path, cache: str) -> None:
        self._children, self._folder, self._cache = children, folder, cache

    def run(self, *words: str, plant: str = "") -> Ran:
        """Train a tiny model with one sequence a micro-batch and two an iteration.

        `plant` is MODULE:FUNCTION of a context manager in which every rank trains.
        """
        number = len(self._children)
        paths = [f"paths.root={tempfile.mkdtemp(dir=self._folder)}", self._cache]
        base = [*TINY, *paths, "training.micro_batch_size=1", "training.global_batch_size=2"]
        base += [f"launcher.num_processes={number}", "launcher.num_threads=1", "capture=off"]
        experiment = compose([*base, *words], None, {})
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with (
            open_run(experiment, "cpu", ["test"]) as (opened, _),
            ThreadPoolExecutor(number) as pool,
        ):
            root = str(opened.run.root)
            ends = [
                pool.submit(child.run, work, root, Rank(rank, number, rank), store.port, plant)
                for rank, child in enumerate(self._children)
            ]
            codes = [end.result() for end in ends]
        return ran(opened.run, codes)

    def ask(self, function: Callable[[], Any]) -> list[Any]:
        """What a function answers in each child."""
        return [child.run(function) for child in self._children]


def ran(run: RunDir, codes: list[int]) -> Ran:
    """What the ranks of a run left behind."""
    if any(codes):
        if len(codes) > 1:
            state, reason = outcome_of_ranks(run, len(codes))
            assert state is State.FAILED
        else:
            reason = json.loads(run.status.read_text())["reason"]
        return Ran(reason, [], {}, run.root)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return Ran(
        None,
        [(line["loss"], line["grad_norm"], line.get("validation_loss")) for line in lines],
        json.loads(run.precision.read_text()),
        run.root,
    )


def work(root: str, rank: Rank, port: int, plant: str) -> int:
    """Be a rank of a run, in a child; its exit code."""
    from megatron.core import optimizer

    from quantexp.config.load import read
    from quantexp.training.megatron import session
    from quantexp.training.worker import Worker
    from tests.extras.transformer_engine.rank import kernels

    kernels.install()
    optimizer.USING_PYTORCH_OPTIMIZER = True  # not Transformer Engine's fused Adam, a kernel
    run = RunDir(Path(root))
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment |= dict(zip(names, map(str, dataclasses.astuple(rank)), strict=True))
    module, _, planted = plant.partition(":")
    with (
        getattr(importlib.import_module(module), planted)() if plant else contextlib.nullcontext(),
        mock.patch.dict(os.environ, environment),
        mock.patch.object(session, "cpu_device", contextlib.nullcontext),  # the child is inside it
    ):
        return Worker(run, read(run.config), rank).run()


def equal(a: dict[tuple[object, ...], Tensor], b: dict[tuple[object, ...], Tensor]) -> bool:
    """Whether two runs captured the same tensors, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
