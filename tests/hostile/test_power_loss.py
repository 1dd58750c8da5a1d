"""Power failures while files are written: a reader sees the old content, the new one, or names the damage."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quantexp.capture import open_capture
from quantexp.capture.check.folder import check
from quantexp.capture.store.manifest import finish_capture
from quantexp.errors import CaptureError, QuantexpError
from quantexp.model.checkpoint_hashes import require_intact
from quantexp.model.checkpoints import STATE, STATE_INDEX, iteration_of
from quantexp.model.huggingface.weights import open_weights
from quantexp.model.training_state import SavedPieces, read_index
from quantexp.runs.metrics import read_metrics
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, finish, read_status, write_json, write_status
from quantexp.schema import StoreKind
from tests.hostile.captured import write_capture
from tests.hostile.power import Recording, recorded
from tests.model.small_checkpoints import PUBLISHED, save, tiny_llama


def states(
    recording: Recording, cases: Iterator[random.Random], folder: Path
) -> Iterator[tuple[int, Path]]:
    """For each case the event of a power failure, and the folder as it is afterwards."""
    for source in cases:
        folder.mkdir()
        yield recording.crash(source, folder), folder
        shutil.rmtree(folder)


def test_status_is_old_new_or_named_and_the_last_one_is_never_lost(
    tmp_path: Path, cases: Iterator[random.Random]
) -> None:
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    status = Status()
    with recorded(run.root) as recording:
        for iteration in range(3):
            status.state, status.iteration = State.RUNNING, iteration
            write_status(run.status, status)
        finish(status, State.COMPLETED, "")
        write_status(run.status, status)
        end = len(recording.names)
        (run.root / "later").write_text("after the end")
    for event, folder in states(recording, cases, tmp_path / "after"):
        try:
            after = read_status(folder / "status.json")
        except QuantexpError as error:
            assert "status.json" in str(error)  # noqa: PT017
            assert event < end
            continue
        assert after is None or after.iteration in range(3)
        assert event < end or (after is not None and after.state is State.COMPLETED)


def test_lists_and_provenance_are_old_new_or_named(
    tmp_path: Path, cases: Iterator[random.Random]
) -> None:
    """Written without fsync: a sweep's list, provenance.json, precision.json."""
    (tmp_path / "sweeps").mkdir()
    contents = [{"runs": [{"run": f"r{i}"} for i in range(n)]} for n in (0, 5, 50)]
    with recorded(tmp_path / "sweeps") as recording:
        for content in contents:
            write_json(tmp_path / "sweeps" / "a.json", content)
    for _, folder in states(recording, cases, tmp_path / "after"):
        file = folder / "a.json"
        if file.exists():
            try:
                after = json.loads(file.read_bytes())
            except ValueError:
                continue
            assert after in contents


def test_metrics_end_earlier_and_no_number_is_another(
    tmp_path: Path, cases: Iterator[random.Random]
) -> None:
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    lines: list[dict[str, Any]] = [{"iteration": i, "loss": 1.5 / i} for i in range(1, 9)]
    with recorded(run.root) as recording:
        for line in lines:
            with run.metrics.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
            recording.look()
    for _, folder in states(recording, cases, tmp_path / "after"):
        after = read_metrics(RunDir(folder))
        assert after == lines[: len(after)]


@pytest.mark.parametrize("kind", StoreKind)
def test_captures_are_whole_or_the_check_names_the_damage(
    tmp_path: Path, cases: Iterator[random.Random], kind: StoreKind
) -> None:
    with recorded(tmp_path / "tensors") as recording:
        write_capture(tmp_path / "tensors", kind)
    written = {e.name: e.torch().clone() for e in open_capture(tmp_path / "tensors").with_values()}
    for event, folder in states(recording, cases, tmp_path / "after"):
        is_whole = event == len(recording.names) - 1
        try:
            entries = list(open_capture(folder).with_values())
        except CaptureError:
            continue
        is_damaged = len(entries) < len(written)
        for entry in entries:
            try:
                assert torch.equal(entry.verified(), written[entry.name])
            except CaptureError:
                is_damaged = True
        if is_damaged and is_whole:
            assert check(folder, is_complete=True, num_ranks=2).problems


def test_joining_the_lists_of_ranks_loses_no_line(
    tmp_path: Path, cases: Iterator[random.Random]
) -> None:
    """Lines that were on the disk before the join are there after it, in the list or still in a part."""
    folder = tmp_path / "tensors"
    write_capture(folder, StoreKind.pt, end=False)
    lines = {line for file in folder.glob("*.jsonl") for line in file.read_bytes().splitlines()}
    for path in folder.glob("mxfp8"):
        shutil.rmtree(path)
    with recorded(folder) as recording:
        for inode in recording.contents:
            recording.synced[inode] = [0]
        recording.synced_names.append((0, str(folder)))
        finish_capture(folder)
    for _, after in states(recording, cases, tmp_path / "after"):
        kept = {line for file in after.glob("*.jsonl") for line in file.read_bytes().splitlines()}
        assert kept == lines


def test_a_checkpoint_is_whole_or_not_there(tmp_path: Path, cases: Iterator[random.Random]) -> None:
    """Of two ranks; the last one is kept alone, and the one that is removed is whole until it has no name."""
    run = RunDir(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    experiment = tiny_llama(2, keep_last=1)
    with recorded(run.checkpoints) as recording:
        for iteration in (1, 2):
            save(run, experiment, iteration)
    for event, folder in states(recording, cases, tmp_path / "after"):
        left = [path for path in folder.iterdir() if iteration_of(path) is not None]
        for checkpoint in left:
            require_intact(checkpoint)
            assert (checkpoint / "hashes.json").is_file()
            assert open_weights(checkpoint).tensors.keys() == PUBLISHED
            files = read_index(checkpoint / STATE / STATE_INDEX).files
            assert SavedPieces.open(checkpoint / STATE, files, ["output_layer.weight"])
        assert event < len(recording.names) - 1 or [iteration_of(path) for path in left] == [2]
