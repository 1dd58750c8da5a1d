"""The command itself on a tiny model: the run folder's contract, skipping, sweeps that fail."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from quantexp.config.load import read
from quantexp.runs.code_digest import code_digest
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status

pytestmark = pytest.mark.slow

TINY = [
    "training=fast",
    "model.num_layers=1",
    "model.hidden_size=64",
    "model.ffn_hidden_size=96",
    "model.num_attention_heads=2",
    "model.num_query_groups=1",
    "model.head_dim=32",
    "training.seq_length=32",
    "training.iterations=2",
    "training.warmup_iterations=1",
    "training.min_lr=0",
    "training.max_nonfinite_iterations=1",
    "analysis.auto=false",
]

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def command(folder: Path, cache: Path) -> Command:
    """`quantexp` in a process of its own, in a folder that all tests of this file share."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "quantexp", *words, *TINY, f"paths.cache={cache}"],
            cwd=folder,
            env={**os.environ, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture(scope="module")
def first(command: Command, folder: Path) -> RunDir:
    """A completed run of bf16."""
    process = command("quant=bf16")
    assert process.returncode == 0, process.stderr
    assert "completed" in process.stdout
    (run,) = (folder / "runs").glob("*-*")
    return RunDir(run)


def test_run_folder_contains_the_contracts_files(first: RunDir, folder: Path) -> None:
    assert first.root.name.startswith("llama32-1b_wikipedia_bf16-")
    assert read(first.config).quant.name == "bf16"
    assert json.loads(first.status.read_text())["state"] == "completed"
    provenance = json.loads(first.provenance.read_text())
    assert provenance["command"][1] == "quant=bf16"
    assert provenance["verified"]["state"] == "not verified"
    metrics = [json.loads(line) for line in first.metrics.read_text().splitlines()]
    assert [line["iteration"] for line in metrics] == [1, 2]
    assert set(metrics[0]) >= {
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "step_time_s",
        "tokens_per_s",
        "tflops",
        "memory_gb",
    }
    entries = json.loads(first.precision.read_text())["entries"]
    assert len(entries) == 4 * 6 + 2 * 6
    lines = [json.loads(s) for s in (first.tensors / "manifest.jsonl").read_text().splitlines()]
    assert lines
    assert all((first.tensors / line["file"]).is_file() for line in lines)
    assert first.rank_log(0).is_file()
    assert list(first.tensorboard.glob("events.out.tfevents.*"))
    assert sorted(p.name for p in folder.iterdir()) == ["runs"], "nothing else is left behind"


def test_second_call_is_skipped_with_a_message(first: RunDir, command: Command) -> None:
    before = first.metrics.stat().st_mtime_ns
    process = command("quant=bf16")
    assert process.returncode == 0
    assert "skipped" in process.stdout
    assert "already completed" in process.stdout
    assert first.metrics.stat().st_mtime_ns == before
    assert not first.attempts.exists()


@pytest.mark.timeout(600)
def test_a_run_made_by_other_code_runs_again_and_is_not_matched(
    tmp_path: Path, cache: Path
) -> None:
    """Other code takes the samples in another order; a copy with one more comment is the same code."""
    trees = {name: tmp_path / name for name in ("other", "commented")}
    for tree in trees.values():
        for part in ("quantexp", "launchers", "conf"):
            shutil.copytree(Path(__file__).parents[1] / part, tree / part)
        file = tree / "quantexp" / "training" / "megatron" / "sample_order.py"
        text = file.read_text()
        other = text.replace("().__getitem__(idx)", "().__getitem__(idx and -idx)")
        assert other != text
        file.write_text(other if tree.name == "other" else f"{text}#")

    def quantexp(tree: Path | None, *words: str) -> str:
        path = {} if tree is None else {"PYTHONPATH": f"{tree}:{tree / 'launchers'}"}
        (tmp_path / "work").mkdir(exist_ok=True)
        process = subprocess.run(
            [sys.executable, "-m", "quantexp", *words],
            cwd=tmp_path / "work",
            env={**os.environ, "COLUMNS": "200", **path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        return process.stdout

    words = [*TINY, f"paths.cache={cache}", "capture=off"]
    quantexp(trees["other"], "-m", "quant=bf16,linear_mxfp8", *words)
    folders = [RunDir(each) for each in sorted((tmp_path / "work" / "runs").glob("*-*"))]
    dishonest, mxfp8 = (json.loads(run.provenance.read_text())["code"] for run in folders)
    assert dishonest == mxfp8 == code_digest(trees["other"] / "quantexp") != code_digest()
    losses = folders[0].metrics.read_bytes()
    again = (
        f"completed before with other code ({dishonest} then, {code_digest()} now): running again"
    )
    assert again in " ".join(quantexp(None, "plan", "quant=bf16", *words).split())
    assert again in quantexp(None, "quant=bf16", *words)
    assert (folders[0].attempts / "1" / "metrics.jsonl").read_bytes() == losses
    assert _losses(losses) != _losses(folders[0].metrics.read_bytes())
    assert json.loads(folders[0].provenance.read_text())["code"] == code_digest()
    assert "already completed" in quantexp(trees["commented"], "quant=bf16", *words)
    why = f"code ({dishonest[:8]} against {code_digest()[:8]})"
    assert why in " ".join(quantexp(None, "compare", "runs", "out=drawn").split())
    (row,) = (
        run
        for run in json.loads(quantexp(None, "compare", "runs", "--json"))["runs"]
        if not run["is_baseline"]
    )
    assert (row["code"], row["matched"]) == ([dishonest], False)


def _losses(metrics: bytes) -> list[float]:
    return [json.loads(line)["loss"] for line in metrics.splitlines()]


def test_sweep_runs_unfinished_points_and_prints_its_table(
    first: RunDir, command: Command, folder: Path
) -> None:
    process = command("-m", "quant=bf16,FA_mxfp8")
    assert process.returncode == 0, process.stderr
    assert "2 runs" in process.stdout
    header, *lines = process.stdout[process.stdout.index("2 runs") :].splitlines()[1:]
    assert header.split()[:3] == ["scheme", "final", "loss"]
    assert [line.split()[0] for line in lines[:2]] == ["bf16", "FA_mxfp8"]
    assert ["skipped" in line for line in lines[:2]] == [True, False]
    (file,) = (folder / "runs" / "sweeps").glob("*.json")
    rows = json.loads(file.read_text())["runs"]
    assert [row["state"] for row in rows] == ["completed", "completed"]
    assert [row["skipped"] for row in rows] == [True, False]
    quantised = RunDir(folder / "runs" / rows[1]["run"])
    entries = json.loads(quantised.precision.read_text())["entries"]
    forward = [e for e in entries if (e["site"], e["product"]) == ("qk", "fprop")]
    assert [(e["operand"], e["status"]) for e in forward] == [("q", "engaged"), ("k", "engaged")]


def test_sweep_continues_after_failures_and_exits_1(
    first: RunDir, command: Command, folder: Path
) -> None:
    """Two points whose data is missing, one whose weights overflow, one that is already completed."""
    process = command("-m", "dataset.path=/nowhere/data,null", "training.lr=1e30,1e-4")
    assert process.returncode == 1
    assert process.stdout.count("no tokenised dataset at /nowhere/data: ") == 4, "told twice each"
    assert "4 runs" in process.stdout
    *_, file = sorted((folder / "runs" / "sweeps").glob("*.json"))
    rows = json.loads(file.read_text())["runs"]
    *not_started, overflowed, repeated = rows
    assert (overflowed["state"], repeated["state"]) == ("failed", "completed")
    assert overflowed["reason"].startswith("stopped at iteration ")
    assert "in 1 iterations in a row (training.max_nonfinite_iterations)" in overflowed["reason"]
    assert repeated["run"] == first.root.name
    assert repeated["skipped"]
    assert [(row["run"], row["state"]) for row in not_started] == [(None, "failed")] * 2
    failed = RunDir(folder / "runs" / overflowed["run"])
    assert json.loads(failed.status.read_text())["reason"] == overflowed["reason"]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_ending_a_command_ends_its_worker(tmp_path: Path, cache: Path, how: signal.Signals) -> None:
    command = [sys.executable, "-m", "quantexp", *TINY, "training.iterations=100000", "capture=off"]
    command += [f"paths.root={tmp_path}", f"paths.cache={cache}"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    status = None
    for _ in range(2400):
        files = list(tmp_path.glob("*/status.json"))
        status = read_status(files[0]) if files else None
        if status is not None and status.iteration > 0:
            break
        time.sleep(0.1)
    assert status is not None
    assert status.pid is not None
    process.send_signal(how)
    process.wait(240)
    for _ in range(2400):
        if not psutil.pid_exists(status.pid):
            break
        time.sleep(0.1)
    assert not psutil.pid_exists(status.pid)
    ended = read_status(files[0])
    assert ended is not None
    # SIGKILL does not show that the user wants to end the run.
    assert ended.state is (State.PREEMPTED if how is signal.SIGKILL else State.CANCELLED)
    if how is not signal.SIGKILL:
        assert process.returncode == 130


def test_old_variables_decide_what_every_point_of_a_sweep_captures(
    command: Command, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "mxfp4")
    monkeypatch.setenv("TENSOR_SAVE_ENABLED", "1")
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(tmp_path / "tensors"))
    refused = command("-m", "training.seed=71,72", "capture=stats,off")
    assert refused.returncode == 1
    assert (
        "TENSOR_SAVE_ENABLED=1 (that is, capture=tensors) and capture=stats,off" in refused.stderr
    )
    assert not (tmp_path / "tensors").exists()

    process = command("-m", "training.seed=71,72", "capture.stop_after_capture=true")
    assert process.returncode == 0, process.stderr
    captured = sorted((tmp_path / "tensors").iterdir())
    assert len(captured) == 2
    assert sorted(captured_seeds(folder, captured)) == [71, 72]
    for point in captured:
        lines = [json.loads(line) for line in (point / "manifest.jsonl").read_text().splitlines()]
        assert {line["quant_type"] for line in lines} == {"mxfp4"}
        assert {line["operation"] for line in lines} == {"forward", "backward"}
        assert all((point / line["file"]).is_file() for line in lines)


def captured_seeds(folder: Path, captured: list[Path]) -> list[int]:
    """The seeds of the runs that the folders are named after; each has the scheme of the variable."""
    runs = [read(RunDir(folder / "runs" / point.name).config) for point in captured]
    assert {run.quant.name for run in runs} == {"FA_linear_mxfp4"}
    assert {run.capture.level.value for run in runs} == {"tensors"}
    return [run.training.seed for run in runs]
