"""Training waits for a copy alone; what fails in the background ends the run with its words."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quantexp.errors import RunError
from quantexp.model.checkpoint_hashes import require_intact
from quantexp.model.checkpoint_writer import remove_leftovers
from quantexp.model.checkpoints import folder_of, saved_iterations
from quantexp.model.training_state import read_index
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment
from quantexp.training import saver as saver_module
from quantexp.training.megatron.state_shards import RankState
from quantexp.training.saver import CheckpointSaver
from tests.model.small_checkpoints import CHUNKS, saver_of, state_of, tiny_llama, whole

RunTiny = Callable[..., RunDir]
RANK_0 = "rank00000.safetensors"


@pytest.fixture
def experiment() -> Experiment:
    return tiny_llama(asynchronous=True)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


@pytest.fixture
def saver(run: RunDir, experiment: Experiment) -> Iterator[CheckpointSaver]:
    with contextlib.closing(saver_of(run, experiment)) as saver:
        yield saver


def identity(state: RankState) -> RankState:
    return state


def save(saver: CheckpointSaver, iteration: int, nonfinite: int = 0) -> None:
    rank = saver.context.rank.rank
    state = state_of(saver.experiment, rank, iteration)
    saver.save(iteration, CHUNKS, lambda: state, nonfinite)


def test_checkpoint_has_the_state_at_the_save_although_training_changes_it(
    run: RunDir, saver: CheckpointSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The background begins to write only after the change; without a copy it would write the changed values."""
    changed = threading.Event()
    write: Callable[..., None] = saver._write_part

    def write_later(*arguments: Any) -> None:
        changed.wait()
        write(*arguments)

    monkeypatch.setattr(saver, "_write_part", write_later)
    for iteration in (1, 2):
        changed.clear()
        state = state_of(saver.experiment, 0, iteration)
        saver.save(iteration, CHUNKS, partial(identity, state), 0)
        for _, tensor in state.named_tensors():
            tensor.fill_(-1.0)
        changed.set()
        saver.finish()
        saved = load_file(folder_of(run, iteration) / "state" / RANK_0)
        expected = whole(iteration)
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[name], expected[name]) for name in saved)


def test_copies_use_the_memory_of_the_save_before(saver: CheckpointSaver) -> None:
    num_bytes = []
    for iteration in (1, 2, 3):
        save(saver, iteration)
        saver.finish()
        num_bytes.append(saver._memory.num_bytes)
    values = sum(x.nbytes for x in whole(1).values())
    assert num_bytes == [values] * 3


def test_training_that_waits_copies_nothing(run: RunDir) -> None:
    with contextlib.closing(saver_of(run, tiny_llama())) as saver:
        save(saver, 1)
        assert saved_iterations(run) == [1], "it is whole when training goes on"
        assert saver._memory.num_bytes == 0


def test_all_else_is_settled_before_the_record_is_there(
    run: RunDir, saver: CheckpointSaver
) -> None:
    """What `settle` returns is called in the background."""
    threads: list[str] = []

    def settled() -> None:
        threads.append(threading.current_thread().name)
        assert not list(run.checkpoints.glob(".*/records/*"))

    def settle() -> Callable[[], None]:
        threads.append(threading.current_thread().name)
        return settled

    saver.settle = settle
    save(saver, 1, nonfinite=2)
    saver.finish()
    assert read_index(folder_of(run, 1) / "state" / "state.json").nonfinite == 2
    assert threads == [threading.main_thread().name, "checkpoint"]
    assert saver.last_s > 0


def test_the_save_before_is_awaited_with_a_message(
    run: RunDir,
    saver: CheckpointSaver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(saver_module, "_LOGGED_S", 0.0)
    caplog.set_level(logging.INFO)
    may_end = threading.Event()

    def waits() -> None:
        may_end.wait()

    saver.settle = lambda: waits
    save(saver, 1)
    assert saved_iterations(run) == []
    threading.Timer(0.3, may_end.set).start()
    save(saver, 2)
    assert saved_iterations(run) == [1]
    saver.finish()
    assert saved_iterations(run) == [1, 2]
    words = [each.getMessage() for each in caplog.records]
    assert any("s until the checkpoint before was written" in each for each in words)


@pytest.mark.parametrize("ends", ["save", "finish"])
def test_error_of_the_background_is_raised_by_the_next_call_and_logged(
    run: RunDir, saver: CheckpointSaver, caplog: pytest.LogCaptureFixture, ends: str
) -> None:
    state = state_of(saver.experiment, 0, 1)
    dict(state.named_tensors())["exp_avg/output_layer.weight"].view(-1)[3] = math.nan
    saver.save(1, CHUNKS, lambda: state, 0)
    words = r"iteration_00000001 is not written: 1 of .* NaN or Inf in exp_avg/output_layer\.weight"
    with pytest.raises(RunError, match=words):
        saver.finish() if ends == "finish" else save(saver, 2)
    assert any("exp_avg/output_layer" in each.getMessage() for each in caplog.records)
    assert list(run.checkpoints.iterdir()) == []


def test_error_of_a_rank_ends_the_wait_of_rank_0(run: RunDir) -> None:
    experiment = tiny_llama(2, asynchronous=True)
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(contextlib.closing(saver_of(run, experiment, rank)))
            for rank in (0, 1)
        )

        def fail() -> None:
            raise OSError(5, "Input/output error", str(run.checkpoints / "x"))

        second.settle = lambda: fail
        save(first, 1)
        save(second, 1)
        with pytest.raises(RunError, match=r"x cannot be written \(Input/output error\); the disk"):
            save(first, 2)
        with pytest.raises(OSError, match="Input/output error"):
            save(second, 2)
    assert list(run.checkpoints.iterdir()) == []


def test_rank_0_gives_up_what_a_lost_rank_does_not_complete(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saver_module, "GRACE_S", 0.2)
    saver = saver_of(run, tiny_llama(2, asynchronous=True))
    save(saver, 1)
    saver.close()
    assert any("nothing came from rank 1" in each.getMessage() for each in caplog.records)
    assert saved_iterations(run) == []


def test_close_completes_what_all_ranks_have_written(run: RunDir) -> None:
    experiment = tiny_llama(2, asynchronous=True)
    savers = [saver_of(run, experiment, rank) for rank in (0, 1)]
    for saver in savers:
        save(saver, 1)
    for saver in savers:
        saver.close()
    assert saved_iterations(run) == [1]


def test_older_checkpoints_go_once_the_new_one_is_whole(run: RunDir) -> None:
    experiment = tiny_llama(asynchronous=True, keep_last=1, keep_every=2)
    with contextlib.closing(saver_of(run, experiment)) as saver:
        for iteration in range(1, 6):
            save(saver, iteration)
        saver.finish()
    assert saved_iterations(run) == [2, 4, 5]
    require_intact(folder_of(run, 5))


def test_old_checkpoint_that_cannot_be_removed_is_a_warning(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(path: Path) -> None:
        raise OSError(39, "Directory not empty", str(path))

    with contextlib.closing(saver_of(run, tiny_llama(keep_last=1))) as saver:
        save(saver, 1)
        monkeypatch.setattr("quantexp.model.checkpoints.remove", fails)
        save(saver, 2)
    assert saved_iterations(run) == [1, 2]
    words = "an old checkpoint was not removed: [Errno 39] Directory not empty: "
    assert [each.getMessage()[: len(words)] for each in caplog.records] == [words]


_KILLED = """
import os, signal, sys, threading
from pathlib import Path
from quantexp.runs.paths import RunDir
from quantexp.training.megatron.state_shards import RankState
from tests.model.small_checkpoints import CHUNKS, saver_of, state_of, tiny_llama
from quantexp.model import checkpoint_writer
experiment, run = tiny_llama(asynchronous=True), RunDir(Path(sys.argv[1]))
saver = saver_of(run, experiment)
saver.save(1, CHUNKS, lambda: state_of(experiment, 0, 1), 0)
saver.finish()
killing = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "part": saver.settle = lambda: killing
elif sys.argv[2] == "published": checkpoint_writer.write_padding = killing
else: checkpoint_writer.record_hashes = killing
saver.save(2, CHUNKS, lambda: state_of(experiment, 0, 2), 0)
saver.finish()
"""


@pytest.mark.parametrize("moment", ["part", "published", "hashes"])
def test_kill_in_the_background_leaves_no_folder_with_a_final_name(
    run: RunDir, moment: str
) -> None:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", "-c", _KILLED, str(run.root), moment]
    killed = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert saved_iterations(run) == [1]
    require_intact(folder_of(run, 1))
    left = {path.name for path in run.checkpoints.iterdir()}
    assert left == {"iteration_00000001", ".iteration_00000002.token.part"}
    remove_leftovers(run.checkpoints)
    assert {path.name for path in run.checkpoints.iterdir()} == {"iteration_00000001"}


@pytest.mark.slow
def test_numbers_and_files_are_the_same_whether_training_waits_or_not(run_tiny: RunTiny) -> None:
    """Every iteration is saved while the next one changes the weights and moments; a stopped run has neither."""
    words = ["training.iterations=4", "capture=off", "quant=more/linear_hifp8_delayed"]
    words += ["checkpoint.every=1", "checkpoint.optimizer=true", "force=true"]
    contents: list[Any] = []
    for waits in ("false", "true"):
        run = run_tiny(*words, f"checkpoint.asynchronous={waits}")
        lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        assert saved_iterations(run) == [1, 2, 3, 4]
        files = sorted(path for path in run.checkpoints.rglob("*") if path.is_file())
        contents.append(
            [
                [(line["loss"], line["grad_norm"]) for line in lines],
                {str(file.relative_to(run.root)): file.read_bytes() for file in files},
            ]
        )
    assert contents[0] == contents[1]
