"""A job runs what was submitted: over two nodes, as planned, whatever is edited meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from quantexp_launchers.local.execute import execute
from rich.console import Console

from quantexp.cli.plan_record import make_plan
from quantexp.config.compose import compose
from quantexp.runs.paths import RunDir, Submission
from quantexp.runs.snapshot import take_snapshot
from quantexp.runs.status import State

from .cluster import Cluster
from .launched import HELD, SMALL, status_of, submitted, until_state

#: Two ranks that share a batch.
SHARED = ["training.micro_batch_size=1", "training.iterations=3", "training.global_batch_size=2"]


def losses(run: RunDir) -> list[tuple[float, float]]:
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines]


@pytest.mark.slow
def test_two_nodes_train_exactly_as_one_process_does(
    plain: Cluster, tiny_words: list[str], tmp_path: Path
) -> None:
    """The gradients of two nodes are reduced; otherwise the second iteration would have another loss."""
    two_nodes = ["launcher.num_processes=2", "launcher.nodes=2"]
    (run,), (job_id,) = submitted(tiny_words, tmp_path / "two", [*SHARED, *two_nodes])
    one = execute(
        compose([*tiny_words, *SHARED, f"paths.root={tmp_path / 'one'}"], None, {}),
        Console(quiet=True),
    )
    assert until_state(run, State.COMPLETED, State.FAILED).state is State.COMPLETED
    assert plain.wait_state(job_id, "COMPLETED") == {job_id: "COMPLETED"}
    assert losses(run) == losses(one.run)
    (job,) = plain.jobs(job_id)
    assert job["NodeList"] == "n[1-2]"
    assert json.loads(run.precision.read_text())["proved"]


def test_run_and_accounting_agree_and_the_job_is_named(
    accounting: Cluster, tiny_words: list[str], tmp_path: Path
) -> None:
    (run,), (job_id,) = submitted(tiny_words, tmp_path, [])
    status = until_state(run, State.COMPLETED)
    accounting.wait_state(job_id, "COMPLETED")
    assert (status.job_id, status.host in ("n1", "n2")) == (job_id, True)
    ran = json.loads(run.provenance.read_text())["ran"]
    assert (ran["host"], ran["device"]) == (status.host, "cpu")


EDITED = "raise SystemExit('the edited source ran')\n"


def test_job_runs_what_was_submitted_whatever_is_edited_while_it_waits(
    plain: Cluster, tiny_words: list[str], tmp_path: Path
) -> None:
    """Submits from a tree of its own and breaks it while the job is held."""
    tree = take_snapshot.__wrapped__(tmp_path / "tree")
    words = [*tiny_words, *SMALL, HELD, f"paths.root={tmp_path / 'runs'}", "training.seed=7"]
    subprocess.run(
        [sys.executable, "-m", "quantexp", *words],
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"},
        check=True,
        capture_output=True,
    )
    (folder,) = (tmp_path / "runs").glob("llama*")
    run = RunDir(folder)
    job_id = status_of(run).job_id
    assert job_id is not None
    job = tree / "quantexp_launchers" / "slurm" / "job.py"
    for file in (
        job,
        tree / "quantexp" / "training" / "worker.py",
        tree / "quantexp" / "__init__.py",
    ):
        file.chmod(0o600)
        file.write_text(EDITED)
    plain.scontrol("release", job_id)
    assert until_state(run, State.COMPLETED, State.FAILED).state is State.COMPLETED
    assert not (job.parent / "__pycache__" / "job.cpython-311.pyc").exists()


def test_plan_prints_the_exact_script(
    plain: Cluster, tiny_words: list[str], tmp_path: Path
) -> None:
    words = ["launcher.setup=[echo ready]", "launcher.mem_gb=2"]
    experiment = compose([*tiny_words, *SMALL, HELD, f"paths.root={tmp_path}", *words], None, {})
    planned = make_plan(experiment).script
    assert planned is not None
    (run,), _ = submitted(tiny_words, tmp_path, [*words, HELD])
    name = str(status_of(run).submission)
    sent = Submission(tmp_path / "submissions" / name).script
    assert sent.read_text() == planned.replace("quantexp-TIME-ID", name)


@pytest.mark.slow
def test_four_tasks_on_two_nodes_share_one_model(
    plain: Cluster, tiny_words: list[str], tmp_path: Path
) -> None:
    """Two stages of two ranks each; products of mxfp4 are exact in fp32, so only norms and softmax differ, by 1e-7."""
    shared = ["quant=linear_mxfp4", "training.precision=fp32", "model.ffn_hidden_size=256"]
    layout = ["parallel.tensor=2", "parallel.pipeline=2"]
    nodes = ["launcher.num_processes=4", "launcher.nodes=2", "launcher.num_threads=1"]
    words = [*SHARED, *shared]
    (run,), (job_id,) = submitted(tiny_words, tmp_path / "four", [*words, *layout, *nodes])
    one = execute(
        compose([*tiny_words, *words, f"paths.root={tmp_path / 'one'}"], None, {}),
        Console(quiet=True),
    )
    assert until_state(run, State.COMPLETED, State.FAILED).state is State.COMPLETED
    for ours, theirs in zip(losses(run), losses(one.run), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    (job,) = plain.jobs(job_id)
    assert (job["NodeList"], job["NumTasks"]) == ("n[1-2]", "4")
    assert json.loads(run.precision.read_text())["proved"]
    assert len(list(run.logs.glob("rank*.log"))) == 4
