"""Whatever ends the jobs of a run with checkpoints, it goes on by itself and computes what an undisturbed run does."""

from __future__ import annotations

from pathlib import Path

import kills
import pytest
from quantexp_launchers.local.execute import execute
from rich.console import Console

from quantexp.config.compose import compose
from quantexp.launch.ledger.standing import standings
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State

from .cluster import Cluster
from .launched import ENDLESS, start_again, status_of, submitted, until, until_state, until_training

SAVES = ["checkpoint.every=10", "checkpoint.optimizer=true", "checkpoint.keep_last=2"]
#: Some tenths of a second for an iteration, so that the run is not over before its last fate.
LONG = ["training.iterations=120", "training.global_batch_size=8", "training.micro_batch_size=1"]
CAPTURE = ["capture=tensors", "capture.every=20", "quant=linear_mxfp4", "tracking.tensorboard=true"]
#: A warning leaves time for a save and little more.
WARNED = ["launcher.signal_s=12", "launcher.max_requeue=6"]


def put_back(cluster: Cluster, run: RunDir, job_id: str, number: int) -> None:
    """Let the requeued job start now, and wait until its run trains again."""
    cluster.wait_state(job_id, "PENDING", 60)
    start_again(cluster, job_id)
    until_training(run, number)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_goes_on_after_every_kind_of_end_and_equals_an_undisturbed_one(
    plain: Cluster, tiny_words: list[str], tmp_path: Path
) -> None:
    words = [*LONG, *SAVES, *CAPTURE, "checkpoint.at_end=true"]
    where = ["launcher.nodelist=n2", "launcher.partition=lo", "+launcher.sbatch.exclusive=true"]
    (run,), (job_id,) = submitted(tiny_words, tmp_path / "slurm", [*words, *WARNED, *where])
    until_training(run)
    for number in (1, 2):  # what SLURM does before the time limit
        plain.call("scancel", "--signal=USR2", job_id)
        put_back(plain, run, job_id, number)
    other = plain.sbatch("true", "--partition=hi", "--nodelist=n2", "--exclusive", "-o/dev/null")
    plain.wait_state(other, "COMPLETED", 60)
    put_back(plain, run, job_id, 3)
    plain.scontrol("requeue", job_id)
    put_back(plain, run, job_id, 4)
    plain.down_node("n2")
    plain.wait_state(job_id, "PENDING", 60)
    plain.start_node("n2")
    put_back(plain, run, job_id, 5)
    status = until_state(run, State.COMPLETED, State.FAILED, within_s=300)
    assert status.state is State.COMPLETED, status.reason
    causes = [str(each["reason"]).partition(" at iteration ")[0] for each in status.restarts]
    limit = "the time limit of 30 min was reached"
    assert causes[:3] == [limit, limit, "preempted by another job"]
    assert causes[4] == "node n2 was lost"
    assert [each["lost"] for each in status.restarts[:3]] == [0, 0, 0], "they saved before the end"
    assert all(each["requeued"] and each["lost"] < 20 for each in status.restarts)
    assert not run.attempts.exists()

    alone = [*tiny_words, *words, f"paths.root={tmp_path / 'here'}"]
    undisturbed = execute(compose(alone, None, {}), Console(quiet=True))
    assert kills.differences(undisturbed.run.root, run.root) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_that_is_ended_at_its_time_limit_is_requeued(
    plain: Cluster, tiny_words: list[str], tmp_path: Path
) -> None:
    """SLURM looks at time limits every 30 s; it ends this job without a warning."""
    (run,), (job_id,) = submitted(tiny_words, tmp_path, [*ENDLESS, *SAVES])
    until("a checkpoint", lambda: list(run.checkpoints.glob("iteration_*")), 120)
    plain.scontrol("update", f"jobid={job_id}", "endtime=now+1seconds")
    put_back(plain, run, job_id, 1)
    (restart,) = status_of(run).restarts
    assert str(restart["reason"]).startswith("the time limit of ")
    assert restart["goes_on_from"] > 0
    assert restart["lost"] == 0
    plain.call("scancel", job_id)
    until_state(run, State.CANCELLED)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_next_job_of_a_chain_goes_on_with_the_run(
    plain: Cluster, tiny_words: list[str], tmp_path: Path
) -> None:
    words = [*LONG, "training.iterations=80", *SAVES, "capture=off", "launcher.chain=2"]
    (run,), (job_id,) = submitted(tiny_words, tmp_path, [*words, "launcher.signal_s=12"])
    first, second, third = (str(int(job_id) + n) for n in range(3))
    until_training(run)
    plain.call("scancel", "--signal=USR2", first)
    plain.wait_state(first, "FAILED", 60)
    assert status_of(run).job_id == second
    (standing,) = standings([run])
    assert standing.alive, "a resume would start it twice"
    until_training(run, 1)
    status = until_state(run, State.COMPLETED, State.FAILED, within_s=240)
    assert (status.state, status.job_id) == (State.COMPLETED, second)
    assert status.restarts[0]["lost"] == 0
    assert plain.wait_state(second, "COMPLETED", 60) == {second: "COMPLETED"}
    status = status_of(run)  # the trackers' last words come after the state
    assert plain.wait_state(third, "COMPLETED", 60) == {third: "COMPLETED"}
    assert status_of(run) == status, "the last job has nothing to do"
