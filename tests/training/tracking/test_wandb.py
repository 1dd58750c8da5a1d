"""W&B itself: offline, read back from its own file; and online without its server."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, read_status
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


def messages_of(file: Path) -> list[Any]:
    """The messages that W&B will send, by its own definition of them."""
    from wandb.proto.wandb_internal_pb2 import Record

    return [Record.FromString(content) for content in records(file)]


def read_messages(run: RunDir) -> list[Any]:
    (file,) = run.wandb.glob("offline-run-*/run-*.wandb")
    return messages_of(file)


def history(run: RunDir) -> list[dict[str, Any]]:
    return [
        items(m.history) for m in read_messages(run) if m.WhichOneof("record_type") == "history"
    ]


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
def test_history_is_the_metrics(real: RunDir) -> None:
    rows = history(real)
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


# After the run, with and without its server.

#: `wandb` in a process of its own, with less patience.
SCRIPT = """\
import sys
from quantexp.training.tracking import upload, wandb
wandb.INIT_S = 2.0
sys.exit(upload.main(["wandb", sys.argv[1]]))
"""


def record(run: RunDir) -> dict[str, Any]:
    status = read_status(run.status)
    assert status is not None
    return status.tracking["wandb"]


def send(run: RunDir) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, str(run.root)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def ended_run(tracked: Callable[..., TrackedRun], *words: str) -> RunDir:
    completed = Status(State.COMPLETED, created="2026-01-02T03:04:05+00:00")
    return tracked("tracking.wandb.enabled=true", *words, status=completed).folder


@pytest.mark.slow
def test_second_upload_sends_what_the_server_did_not_get(
    tracked: Callable[..., TrackedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRETS["WANDB_API_KEY"])
    run = ended_run(tracked)
    run.metrics.write_text(json.dumps(line(1)) + "\n")
    with silent() as server:
        for address in (server, absent()):
            monkeypatch.setenv("WANDB_BASE_URL", address)
            process = send(run)
            assert process.returncode == 1, process.stderr
            assert process.stderr.startswith("CommError: ")
            assert SECRETS["WANDB_API_KEY"] not in process.stdout + process.stderr
            assert record(run)["trouble"].startswith("CommError: ")
            assert (record(run)["iteration"], record(run)["ended"]) == (0, False)
    monkeypatch.setenv("WANDB_MODE", "offline")  # the network is back; there is no real server
    assert send(run).returncode == 0
    (row,) = history(run)
    assert (row["_step"], row["train/loss"]) == (1, 4.0)
    assert (record(run)["iteration"], record(run)["ended"], record(run)["trouble"]) == (1, True, "")


@pytest.mark.slow
def test_missing_key_is_its_own_message(
    tracked: Callable[..., TrackedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    run = ended_run(tracked, "tracking.wandb.mode=online")
    monkeypatch.setenv("HOME", str(run.root))
    process = send(run)
    assert process.returncode == 1
    assert process.stderr.startswith("UsageError: No API key configured")


@pytest.mark.slow
def test_statistics_are_in_the_history_of_their_iteration(
    tracked: Callable[..., TrackedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = ended_run(tracked)
    run.metrics.write_text("".join(json.dumps(line(i)) + "\n" for i in (1, 2, 3)))
    run.curves.write_text(json.dumps(curves_line(2)) + "\n")
    process = send(run)
    assert (process.returncode, process.stderr) == (0, "")
    rows = history(run)
    assert [row.get("amax/L0-fc1/input") for row in rows] == [None, 2.5, None]
    tag = "log2_magnitude/L0/key"
    assert rows[1][f"{tag}._type"] == "histogram"
    assert (rows[1][f"{tag}.values"], rows[1][f"{tag}.bins"]) == ([2, 0, 7], [-3, -2, -1, 0])


RETRIES = """\
import os, sys
from pathlib import Path
from quantexp.config.load import read
from quantexp.runs.paths import RunDir
from quantexp.training.tracking import upload, wandb
from quantexp.training.tracking.events import TrackedRun
wandb.INIT_S = 2.0
run = RunDir(Path(sys.argv[1]))
upload_ = upload.Upload(wandb, TrackedRun(run, read(run.config), 1, "2026"), upload.record_of({}))
print(upload_.send(), upload_.delivery["trouble"])
os.environ["WANDB_MODE"] = "offline"  # the network is back; there is no real server
print(upload_.send(), upload_.delivery["iteration"])
"""


@pytest.mark.slow
def test_start_that_failed_succeeds_later_in_the_same_process(
    tracked: Callable[..., TrackedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B's service refuses the id of a failed start, unless it is ended."""
    monkeypatch.setenv("WANDB_API_KEY", SECRETS["WANDB_API_KEY"])
    monkeypatch.setenv("WANDB_BASE_URL", absent())
    monkeypatch.setenv("WANDB_MODE", "online")
    run = ended_run(tracked)
    run.metrics.write_text(json.dumps(line(1)) + "\n")
    command = [sys.executable, "-c", RETRIES, str(run.root)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    first, second = process.stdout.splitlines()
    assert first.startswith("False CommError: ")
    assert second == "True 1"


STOPS = """\
import signal, sys, threading
from pathlib import Path
from quantexp.config.load import read
from quantexp.runs.paths import RunDir
from quantexp.training.tracking import wandb
from quantexp.training.tracking.events import TrackedRun
from wandb.sdk.lib.interrupt import interrupt_main
signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
run = RunDir(Path(sys.argv[1]))
tracker = wandb.start(TrackedRun(run, read(run.config), 1, "2026"))
stop = tracker._run.settings.stop_fn or interrupt_main  # as RunStatusChecker of W&B has it
thread = threading.Thread(target=stop)
thread.start()
thread.join()
"""


@pytest.mark.slow
def test_button_that_stops_a_run_does_not_interrupt_the_training(
    tracked: Callable[..., TrackedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    command = [sys.executable, "-c", STOPS, str(ended_run(tracked).root)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert process.stdout == ""
