"""Whatever ends a job, its run's state is correct, and the run is requeued when it should be, as often as allowed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from quantexp.launch.ledger.cancel import cancel
from quantexp.launch.ledger.standing import standings
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import read_record
from quantexp.runs.status import State

from .cluster import Cluster
from .launched import ENDLESS, start_again, status_of, submitted, until, until_state, until_training


def sacct(cluster: Cluster, job_id: str) -> tuple[str, str]:
    """State and exit code, once accounting has the job's end."""

    def ended() -> list[str]:
        line = cluster.sacct("--allocations", f"--jobs={job_id}", "--format=state,exitcode").strip()
        return [] if line.startswith(("RUNNING", "PENDING", "COMPLETING")) else line.split("|")

    state, code = until(f"job {job_id} in accounting", ended, 20)
    return state.partition(" ")[0], code


@pytest.mark.slow
def test_ends_agree_in_status_and_accounting(
    accounting: Cluster, tiny_words: list[str], tmp_path: Path
) -> None:
    """One array, five fates; the time limit takes half a minute, because SLURM checks it that rarely."""
    fates = [[*ENDLESS, f"training.seed={seed}"] for seed in range(4)]
    broken = ["training.lr=1e30", "training.max_nonfinite_iterations=1", "training.iterations=50"]
    runs, jobs = submitted(tiny_words, tmp_path, *fates, broken)
    limited, cancelled, killed, signalled, failed = runs
    until_training(limited)
    accounting.scontrol("update", f"jobid={jobs[0]}", "endtime=now+2seconds")
    until_training(cancelled)
    accounting.call("scancel", jobs[1])
    os.kill(int(str(until_training(killed).pid)), signal.SIGKILL)
    os.kill(int(str(until_training(signalled).pid)), signal.SIGTERM)
    ends = [
        (status_of(run).state, *sacct(accounting, job_id))
        for run, job_id in zip(runs, jobs, strict=True)
        if accounting.wait_state(job_id, {"TIMEOUT", "CANCELLED", "FAILED"}, 120)
    ]
    assert ends == [
        (State.PREEMPTED, "TIMEOUT", "0:0"),
        (State.CANCELLED, "CANCELLED", "0:0"),
        (State.FAILED, "FAILED", "1:0"),
        (State.CANCELLED, "FAILED", "1:0"),
        (State.FAILED, "FAILED", "1:0"),
    ]
    reached = f"at iteration {status_of(limited).iteration} of 1000000"
    assert status_of(limited).reason.startswith("the time limit of ")
    assert f"was reached {reached}; it will begin again" in status_of(limited).reason
    assert status_of(cancelled).reason.startswith("cancelled in the scheduler at iteration ")
    log = killed.rank_log(0)
    assert (
        status_of(killed).reason == f"the worker was ended by SIGKILL (out of memory?); see {log}"
    )
    assert status_of(signalled).reason == "ended by a signal that the scheduler did not send"
    assert status_of(failed).reason.startswith("stopped at iteration ")


def until_put_back(cluster: Cluster, run: RunDir, job_id: str) -> None:
    """Wait until the scheduler has requeued the run's job and the run has recorded that."""
    cluster.wait_state(job_id, "PENDING", 60)
    words = "; it will begin again at its first iteration"
    until(f"{words!r}", lambda: status_of(run).reason.endswith(words), 20)
    assert status_of(run).state is State.PREEMPTED


@pytest.mark.slow
def test_run_is_requeued_a_bounded_number_of_times_each_with_its_reason(
    plain: Cluster, tiny_words: list[str], tmp_path: Path
) -> None:
    words = [*ENDLESS, "launcher.max_requeue=2", "launcher.nodelist=n2", "launcher.partition=lo"]
    (run,), (job_id,) = submitted(tiny_words, tmp_path, [*words, "+launcher.sbatch.exclusive=true"])
    first = until_training(run)

    # The run's own record of this end is not checked: if the node happens to register now, its steps are killed at
    # once (`Registered PENDING JobId`), and the job determines the cause at its next start.
    plain.down_node("n2")
    plain.wait_state(job_id, "PENDING", 60)
    plain.start_node("n2")
    start_again(plain, job_id)
    second = until_training(run, 1)
    attempt = RunDir(run.attempts / "1")
    assert json.loads(attempt.status.read_text())["created"] == first.created
    assert attempt.metrics.read_text()
    assert attempt.config.read_bytes() == run.config.read_bytes()

    other = plain.sbatch("true", "--partition=hi", "--nodelist=n2", "--exclusive", "-o/dev/null")
    until("preempted", lambda: plain.jobs(job_id)[0]["PreemptTime"] != "None", 20)
    # This cluster warns and ends the job 10 s later; a job that ends by itself before that counts as failed.
    os.kill(int(str(second.pid)), signal.SIGTERM)
    until_put_back(plain, run, job_id)
    plain.wait_state(other, "COMPLETED")
    start_again(plain, job_id)
    until_training(run, 2)

    plain.scontrol("requeue", job_id)
    plain.wait_state(job_id, "PENDING", 60)
    status = until_state(run, State.FAILED, within_s=20)
    causes = [str(restart["reason"]).partition(" at iteration ")[0] for restart in status.restarts]
    assert causes == ["node n2 was lost", "preempted by another job"]
    assert status.reason.startswith(
        "requeued 3 times, and launcher.max_requeue=2 allows no more: node n2 was lost at"
    )
    assert "; requeued at iteration " in status.reason
    start_again(plain, job_id)
    plain.wait_state(job_id, "FAILED")
    assert status_of(run).state is State.FAILED
    assert sorted(p.name for p in run.attempts.iterdir()) == ["1", "2"]


@pytest.mark.slow
def test_start_that_a_lost_node_still_runs_makes_way_for_the_next(
    plain: Cluster, tiny_words: list[str], tmp_path: Path
) -> None:
    """SLURM cannot end what it cannot reach: without slurmd a job's processes continue with the folder's lock."""
    (run,), (job_id,) = submitted(tiny_words, tmp_path, ENDLESS)
    before = until_training(run)
    node = plain.jobs(job_id)[0]["NodeList"]
    plain.kill_node(node)
    plain.down_node(node)
    plain.wait_state(job_id, "PENDING", 60)
    assert status_of(run).state is State.RUNNING, "nobody has told the run"
    plain.start_now(job_id)
    after = until_training(run, 1)
    assert {node, plain.jobs(job_id)[0]["NodeList"]} == {"n1", "n2"}
    assert str(after.restarts[0]["reason"]).startswith("died without recording why on ")
    until("the end of the earlier start", lambda: not Path(f"/proc/{before.pid}").exists(), 20)
    assert until_state(run, State.RUNNING).pid == after.pid


@pytest.mark.slow
def test_stopped_rank_of_a_job_ends_the_run_with_the_reason(
    plain: Cluster, tiny_words: list[str], tmp_path: Path
) -> None:
    """A job of one rank, and one of two; only the process that started a rank watches it from outside."""
    alone = [*ENDLESS, "launcher.timeout_min=0.2"]
    two = [*alone, "training.micro_batch_size=1", "launcher.num_processes=2", "training.seed=2"]
    runs, jobs = submitted(tiny_words, tmp_path, alone, two)
    until_training(runs[0])
    os.kill(int(str(status_of(runs[0]).pid)), signal.SIGSTOP)
    until_training(runs[1])
    record = read_record(runs[1], 1)
    assert record is not None
    os.kill(record.pid, signal.SIGSTOP)
    for run, job_id, who in zip(runs, jobs, ("", "rank 1: "), strict=True):
        plain.wait_state(job_id, {"FAILED"}, 90)
        status = status_of(run)
        assert status.state is State.FAILED, status
        reason = status.reason.splitlines()[0]
        assert reason.startswith(f"{who}no progress for "), status.reason
        assert "(launcher.timeout_min=0.2) at iteration " in reason
        assert "; the process was stopped by a signal (state T)" in reason


@pytest.mark.slow
def test_cancel_ends_a_job_whose_rank_is_stopped(
    plain: Cluster, tiny_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(plain.slurm_conf))
    (run,), (job_id,) = submitted(tiny_words, tmp_path, [*ENDLESS, "training.seed=5"])
    os.kill(int(str(until_training(run).pid)), signal.SIGSTOP)
    (outcome,) = cancel(standings([run]))
    assert outcome.done, outcome
    plain.wait_state(job_id, {"CANCELLED"}, 60)
    assert status_of(run).state is State.CANCELLED
