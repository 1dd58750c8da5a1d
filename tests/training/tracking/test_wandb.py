"""W&B itself: offline, read back from its own file; and online without its server."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, read_status
from quantexp.training.tracking import clients
from quantexp.training.tracking.events import TrackedRun

from .conftest import ITERATIONS, SECRETS, curves_line, line
from .servers import absent, silent

#: W&B's file is a LevelDB log of protobuf messages: https://github.com/google/leveldb/blob/main/doc/log_format.md
BLOCK, HEADER, FILE_HEADER = 32768, 7, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(file: Path) -> Iterator[bytes]:
    content, position, parts = file.read_bytes(), FILE_HEADER, b""
    while position + HEADER <= len(content):
        if BLOCK - position % BLOCK < HEADER:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (FULL, LAST):
            yield parts
            parts = b""


def read_messages(run: RunDir) -> list[Any]:
    """The messages that W&B will send, by its own definition of them."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = run.wandb.glob("offline-run-*/run-*.wandb")
    return [Record.FromString(content) for content in records(file)]


def items(message: Any) -> dict[str, Any]:
    return {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in message.item}


@pytest.fixture(scope="session")
def messages(real: RunDir) -> list[Any]:
    return read_messages(real)


def only(messages: list[Any], kind: str) -> Any:
    (message,) = [getattr(m, kind) for m in messages if m.WhichOneof("record_type") == kind]
    return message


@pytest.mark.slow
def test_run_has_its_name_id_project_group_and_tags(messages: list[Any], real: RunDir) -> None:
    run = only(messages, "run")
    assert run.display_name == f"{real.root.name}.1"
    status = read_status(real.status)
    assert status is not None
    delivery = status.tracking["wandb"]
    assert run.run_id == delivery["id"]
    assert (run.project, run.run_group, list(run.tags)) == ("quantexp", "tests", ["tiny"])
    assert delivery["where"].startswith("wandb/offline-run-")
    assert (real.root / delivery["where"]).is_dir()
    assert (delivery["iteration"], delivery["ended"], delivery["trouble"]) == (ITERATIONS, True, "")


def test_run_has_the_hyperparameters(messages: list[Any]) -> None:
    config = {u.key: json.loads(u.value_json) for u in only(messages, "run").config.update}
    assert config["model.num_layers"] == 2
    assert config["quant.name"] == "bf16"
    assert config["training.iterations"] == ITERATIONS


@pytest.mark.slow
def test_history_is_the_metrics(messages: list[Any], real: RunDir) -> None:
    rows = [items(m.history) for m in messages if m.WhichOneof("record_type") == "history"]
    metrics = [json.loads(row) for row in real.metrics.read_text().splitlines()]
    assert [row["_step"] for row in rows] == [m["iteration"] for m in metrics]
    for row, measured in zip(rows, metrics, strict=True):
        assert row["train/loss"] == measured["loss"]
        assert row["perf/tokens_per_s"] == measured["tokens_per_s"]
        assert row["_timestamp"] == datetime.fromisoformat(measured["time"]).timestamp()


def test_end_is_recorded(messages: list[Any]) -> None:
    assert only(messages, "exit").exit_code == 0
    updates = [m.summary for m in messages if m.WhichOneof("record_type") == "summary"]
    summary = {u.key: json.loads(u.value_json) for s in updates for u in s.update}
    assert summary["state"] == "completed"


@pytest.mark.slow
def test_neither_output_nor_source_nor_packages_are_recorded_for_sending(
    messages: list[Any], real: RunDir
) -> None:
    kinds = {m.WhichOneof("record_type") for m in messages}
    assert not kinds & {"output", "output_raw", "artifact"}
    assert not only(messages, "run").git.remote_url
    assert not [
        f for f in real.wandb.rglob("*") if f.suffix in (".py", ".patch") or "require" in f.name
    ]


# Without its server.

#: `wandb` in a process of its own, with less patience.
SCRIPT = """\
import sys
from quantexp.training.tracking import upload, wandb
wandb.INIT_S = 2.0
sys.exit(upload.main(["wandb", sys.argv[1]]))
"""


def online(
    tracked: Callable[..., TrackedRun], monkeypatch: pytest.MonkeyPatch, server: str
) -> RunDir:
    """Upload a finished run to an absent server, which the process's exit code must report."""
    monkeypatch.setenv("WANDB_API_KEY", SECRETS["WANDB_API_KEY"])
    monkeypatch.setenv("WANDB_BASE_URL", server)
    completed = Status(State.COMPLETED, created="2026-01-02T03:04:05+00:00")
    run = tracked("tracking.wandb.enabled=true", "tracking.wandb.mode=online", status=completed)
    run.folder.metrics.write_text(json.dumps(line(1)) + "\n")
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(run.folder.root)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1, process.stderr
    assert "CommError: " in process.stderr
    assert SECRETS["WANDB_API_KEY"] not in process.stdout + process.stderr
    return run.folder


@pytest.mark.slow
def test_absent_server_is_recorded_as_trouble(
    tracked: Callable[..., TrackedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = online(tracked, monkeypatch, absent())
    delivery = json.loads(run.delivery("wandb").read_text())
    assert delivery["trouble"].startswith("CommError: ")
    assert (delivery["iteration"], delivery["ended"]) == (0, False)


@pytest.mark.slow
def test_second_upload_sends_what_the_server_did_not_get(
    tracked: Callable[..., TrackedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    with silent() as server:
        run = online(tracked, monkeypatch, server)
    monkeypatch.setenv("WANDB_MODE", "offline")  # the network is back; there is no real server
    config = run.config.read_text()
    run.config.write_text(config.replace("mode: online", "mode: null"))
    subprocess.run([sys.executable, "-c", SCRIPT, str(run.root)], check=True)
    rows = [
        items(m.history) for m in read_messages(run) if m.WhichOneof("record_type") == "history"
    ]
    assert [(row["_step"], row["train/loss"]) for row in rows] == [(1, 4.0)]
    delivery = json.loads(run.delivery("wandb").read_text())
    assert (delivery["iteration"], delivery["ended"], delivery["trouble"]) == (1, True, "")


@pytest.mark.slow
def test_statistics_are_in_the_history_of_their_iteration(
    tracked: Callable[..., TrackedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    completed = Status(State.COMPLETED, created="2026-01-02T03:04:05+00:00")
    run = tracked("tracking.wandb.enabled=true", status=completed).folder
    run.metrics.write_text("".join(json.dumps(line(i)) + "\n" for i in (1, 2, 3)))
    run.curves.write_text(json.dumps(curves_line(2)) + "\n")
    subprocess.run([sys.executable, "-c", SCRIPT, str(run.root)], check=True)
    history = [
        items(m.history) for m in read_messages(run) if m.WhichOneof("record_type") == "history"
    ]
    assert [row.get("amax/L0-fc1/input") for row in history] == [None, 2.5, None]
    tag = "log2_magnitude/L0/key"
    assert history[1][f"{tag}._type"] == "histogram"
    assert (history[1][f"{tag}.values"], history[1][f"{tag}.bins"]) == ([2, 0, 7], [-3, -2, -1, 0])


RETRIES = """\
import os, sys
from pathlib import Path
from quantexp.runs.paths import RunDir
from quantexp.training.tracking import upload, wandb
wandb.INIT_S = 2.0
upload_ = upload.Upload(wandb, upload.tracked_run(RunDir(Path(sys.argv[1]))))
print(upload_.send(), upload_.delivery.trouble)
os.environ["WANDB_MODE"] = "offline"  # the network is back; there is no real server
print(upload_.send(), upload_.delivery.iteration)
"""


@pytest.mark.slow
def test_start_that_failed_succeeds_later_in_the_same_process(
    tracked: Callable[..., TrackedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B's service refuses the id of a failed start, unless it is ended."""
    monkeypatch.setenv("WANDB_API_KEY", SECRETS["WANDB_API_KEY"])
    monkeypatch.setenv("WANDB_BASE_URL", absent())
    monkeypatch.setenv("WANDB_MODE", "online")
    run = tracked("tracking.wandb.enabled=true").folder
    run.metrics.write_text(json.dumps(line(1)) + "\n")
    command = [sys.executable, "-c", RETRIES, str(run.root)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    first, second = process.stdout.splitlines()
    assert first.startswith("False CommError: ")
    assert second == "True 1"


@pytest.mark.slow
def test_server_that_never_answers_neither_ends_nor_delays_a_run(
    run_tiny: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "PATIENCE_S", 1.0)
    monkeypatch.setenv("WANDB_API_KEY", SECRETS["WANDB_API_KEY"])
    with silent() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server)
        run = run_tiny(
            "tracking.wandb.enabled=true",
            "tracking.wandb.mode=online",
            "training.iterations=30",
            "capture=off",
        )
    ended = time.time()
    status = read_status(run.status)
    assert status is not None
    assert (status.state, status.iteration) == (State.COMPLETED, 30)
    assert status.tracking["wandb"]["trouble"]
    assert status.tracking["tensorboard"]["ended"]
    metrics = [json.loads(row) for row in run.metrics.read_text().splitlines()]
    assert all(math.isfinite(row["loss"]) for row in metrics)
    assert status.finished is not None
    finished = datetime.fromisoformat(status.finished).timestamp()
    # The server would block them for ever; a minute is ample even on a busy machine.
    assert finished - datetime.fromisoformat(metrics[-1]["time"]).timestamp() < 60
    assert ended - finished < 60
