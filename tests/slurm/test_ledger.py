"""The ledger against real schedulers: SLURM's actions on jobs, read from their run folders."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from quantexp_launchers.slurm.clients import ClientError
from quantexp_launchers.slurm.scheduler import jobs, jobs_named

from quantexp.cli.main import main
from quantexp.launch.backend import Standing, live_job
from quantexp.launch.ledger.standing import settle, standing, standings
from quantexp.runs.paths import RunDir, RunsRoot
from quantexp.runs.status import State, Status, now, read_status, write_status

from .cluster import Cluster

Captured = pytest.CaptureFixture[str]


class Sent:
    """Run folders whose jobs run a given script, as an array of one submission."""

    def __init__(self, root: Path, cluster: Cluster, count: int, script: str, *options: str):
        self.name = f"quantexp-test-{time.time_ns()}"
        self.folder = RunsRoot(root).submissions / self.name
        self.folder.mkdir(parents=True)
        self.id = cluster.sbatch(
            script,
            f"--job-name={self.name}",
            f"--array=0-{count - 1}",
            f"--output={self.folder}/%A_%a_0_log.out",
            f"--error={self.folder}/%A_%a_0_log.err",
            "--mem=50",
            *options,
        )
        self.runs = [RunDir(root / f"m_d_s{i}-{time.time_ns():x}") for i in range(count)]
        for task, run in enumerate(self.runs):
            run.root.mkdir()
            job = {"submission": self.name, "task": task, "job_id": f"{self.id}_{task}"}
            run.config.write_text("launcher:\n  num_processes: 1\n")
            values = {"launcher": "slurm", "created": now(), "iterations": 8, **job}
            write_status(run.status, Status(**values))  # type: ignore[arg-type]

    def begin(self, task: int) -> None:
        """Write the status of a worker that runs and has done 3 iterations."""
        status = self.status(task)
        status.state, status.started, status.iteration = State.RUNNING, now(), 3
        write_status(self.runs[task].status, status)

    def status(self, task: int) -> Status:
        status = read_status(self.runs[task].status)
        assert status is not None
        return status

    def until(self, task: int, fits: Callable[[Standing], bool], within_s: float = 30) -> Standing:
        """Wait until the standing of a run fits; returns it."""
        end = time.monotonic() + within_s
        while not fits(entry := standing(self.runs[task])):
            assert time.monotonic() < end, entry
            time.sleep(0.2)
        return entry


@pytest.fixture
def send(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Sent]:
    """Submit run folders below `runs` of the working directory."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "runs"

    def make(count: int, script: str, *options: str) -> Sent:
        return Sent(root, cluster, count, script, *options)

    return make


def test_array_that_runs_and_waits(send: Callable[..., Sent]) -> None:
    sent = send(3, "sleep 60", "-wn1", "--exclusive")
    sent.until(0, lambda entry: entry.state is State.RUNNING)
    sent.until(2, lambda entry: "None" not in entry.where and entry.where.endswith(")"))
    entries = standings(sent.runs)
    assert [each.state for each in entries] == [State.RUNNING, State.PENDING, State.PENDING]
    assert all(each.alive for each in entries)
    assert entries[0].where == f"job {sent.id}_0 running on n1"
    assert re.fullmatch(rf"job {sent.id}_2 waiting \((Resources|Priority)\)", entries[2].where)
    statuses = [sent.status(task) for task in range(3)]
    # Its submitter did not live to write the number.
    alone = Status(launcher="slurm", submission=sent.name, task=1)
    run = sent.runs[0]
    running, first, second, same = (live_job(run, status) for status in [*statuses, alone])
    assert running == f"job {sent.id}_0 is running on n1"
    assert first == same
    assert first is not None
    assert first.startswith(f"job {sent.id}_1 is waiting (")
    assert second is not None


def test_end_of_each_job_is_recorded_as_in_the_scheduler(
    cluster: Cluster, send: Callable[..., Sent]
) -> None:
    ends = "case $SLURM_ARRAY_TASK_ID in 0) exit 3;; 1) kill -9 $$;; 2) exit 0;; *) sleep 60;; esac"
    sent = send(4, f"echo begun; while [ ! -e together ]; do sleep 0.1; done; {ends}")
    for task in range(4):
        sent.until(task, lambda entry: entry.state is State.RUNNING)
        sent.begin(task)
    # All end at once: a scheduler without accounting forgets a job 20 s after its end.
    Path("together").touch()
    cluster.call("scancel", f"{sent.id}_3")
    cluster.wait_state(sent.id, ["FAILED", "COMPLETED", "CANCELLED"])
    states = [settle(each).state for each in standings(sent.runs)]
    assert states == [State.FAILED, State.FAILED, State.FAILED, State.CANCELLED]
    log = f"the end of {sent.folder}/{sent.id}_{{}}_0_log.out:\nbegun"
    assert [sent.status(task).reason for task in range(4)] == [
        f"job {sent.id}_0 failed with exit code 3; {log.format(0)}",
        sent.status(1).reason,
        f"job {sent.id}_2 has completed, and the run did not; {log.format(2)}",
        "cancelled in the scheduler at iteration 3 of 8",
    ]
    assert f"job {sent.id}_1 was ended by SIGKILL" in sent.status(1).reason
    assert [sent.status(task).state for task in range(4)] == states


def test_requeued_run_is_pending_and_runs_again(
    cluster: Cluster, send: Callable[..., Sent]
) -> None:
    sent = send(1, "sleep 60", "--requeue")
    sent.until(0, lambda entry: entry.state is State.RUNNING)
    sent.begin(0)
    cluster.scontrol("requeue", f"{sent.id}_0")
    # SLURM gives the reason some moments after it has requeued the job.
    waiting = f"job {sent.id}_0 waiting (BeginTime)"
    entry = sent.until(0, lambda entry: entry.where == waiting)
    assert entry.state is State.PENDING
    assert entry.alive
    assert entry.reason == "requeued (by the scheduler)"
    assert settle(entry).status.state is State.RUNNING  # it has not ended
    cluster.start_now(f"{sent.id}_0")
    sent.until(0, lambda entry: entry.state is State.RUNNING)


def test_run_whose_node_is_lost_was_preempted(cluster: Cluster, send: Callable[..., Sent]) -> None:
    sent = send(1, "sleep 60", "-wn2", "--no-requeue")
    sent.until(0, lambda entry: entry.state is State.RUNNING)
    sent.begin(0)
    cluster.down_node("n2")
    entry = sent.until(0, lambda entry: not entry.alive)
    assert entry.state is State.PREEMPTED
    assert entry.reason == (
        "node n2 was lost at iteration 3 of 8; it will begin again at its first iteration"
    )


@pytest.mark.slow
def test_run_that_reaches_its_time_limit_was_preempted(
    cluster: Cluster, send: Callable[..., Sent]
) -> None:
    sent = send(1, "sleep 600", "--time=1")
    sent.until(0, lambda entry: entry.state is State.RUNNING)
    sent.begin(0)
    entry = sent.until(0, lambda entry: not entry.alive, within_s=180)
    assert entry.state is State.PREEMPTED
    assert entry.reason.startswith("the time limit of 1 min was reached at iteration 3 of 8; ")


def test_tasks_cancelled_before_their_start_are_cancelled(
    cluster: Cluster, send: Callable[..., Sent]
) -> None:
    sent = send(5, "sleep 60", "--exclusive", "-wn1")
    sent.until(0, lambda entry: entry.state is State.RUNNING)
    cluster.call("scancel", f"{sent.id}_4")
    gone = sent.until(4, lambda entry: not entry.alive)
    assert gone.state is State.CANCELLED
    cluster.call("scancel", "--state=PENDING", sent.id)  # the others, together
    entries = standings(sent.runs)
    assert [each.state for each in entries] == [State.RUNNING, *[State.CANCELLED] * 4]
    assert jobs([f"{sent.id}_4"], past=())[f"{sent.id}_4"].id == sent.id  # in the others' line


def test_cancelling_ends_pending_and_running_jobs(
    cluster: Cluster, send: Callable[..., Sent], capsys: Captured
) -> None:
    sent = send(4, "sleep 60", "--exclusive", "-wn1")
    other = send(1, "sleep 60", "-wn2")
    sent.until(0, lambda entry: entry.state is State.RUNNING)
    sent.begin(0)
    (sent.folder / "tasks.json").write_text(
        json.dumps({"runs": [str(run.root) for run in sent.runs], "snapshot": "", "umask": 18})
    )
    assert main(["cancel", str(sent.folder)]) == 0
    assert capsys.readouterr().out.count("cancelled  m_d_s") == 4
    assert {sent.status(task).state for task in range(4)} == {State.CANCELLED}
    cluster.wait_state(sent.id, "CANCELLED")
    assert other.until(0, lambda entry: entry.state is State.RUNNING).alive
    assert main(["status", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert sorted(row["state"] for row in rows) == [*["cancelled"] * 4, "running"]


def test_ended_job_stays_in_accounting(
    accounting: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = Sent(tmp_path / "runs", accounting, 2, "exit 3")
    accounting.wait_state(sent.id, "FAILED")
    end = time.monotonic() + 60
    while accounting.sacct("-X", "-j", sent.id, "-o", "state").split() != ["FAILED", "FAILED"]:
        assert time.monotonic() < end
        time.sleep(0.2)
    # The controller forgets in minutes; squeue's answer is empty then.
    monkeypatch.setattr("quantexp_launchers.slurm.scheduler._queue", lambda _: {})
    sent.begin(0)
    assert standing(sent.runs[0]).reason.startswith(f"job {sent.id}_0 failed with exit code 3")
    assert sorted(task for task in jobs_named(sent.name) if task is not None) == [0, 1]


@pytest.mark.slow
def test_ended_job_is_forgotten_without_accounting(plain: Cluster, tmp_path: Path) -> None:
    sent = Sent(tmp_path / "runs", plain, 1, "exit 3")
    plain.wait_state(sent.id, "FAILED")
    sent.begin(0)
    entry = sent.until(0, lambda entry: entry.job is None, within_s=120)
    assert entry.state is State.PREEMPTED
    assert entry.reason == (
        f"the scheduler no longer knows job {sent.id}_0, and the run did not record its end, at iteration 3 of 8"
    )
    assert jobs_named(sent.name) == {}


def test_unreachable_controller_is_reported_and_the_folder_s_state_counts(
    cluster: Cluster, send: Callable[..., Sent], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent = send(1, "sleep 60")
    nowhere = re.sub(
        r"SlurmctldPort=\d+",
        "SlurmctldPort=1",
        cluster.slurm_conf.read_text() + "\nMessageTimeout=2\n",
    )
    (tmp_path / "slurm.conf").write_text(nowhere)
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
        with pytest.raises(ClientError, match=r"squeue failed \(exit code 1\): .*controller"):
            jobs([sent.id])
        entry = standing(sent.runs[0])
    assert (entry.state, entry.alive) == (State.PENDING, True)
    assert entry.note is not None
    assert entry.note.startswith("its job was not queried: squeue failed")


def test_status_of_sixty_runs_is_quick(send: Callable[..., Sent], capsys: Captured) -> None:
    send(60, "sleep 60", "--exclusive")
    times = []
    for _ in range(3):
        start = time.process_time()  # of this process, without the rest of the machine
        assert main(["status"]) == 0
        times.append(time.process_time() - start)
    assert "60 runs: " in capsys.readouterr().out
    # 0.1 s here; five times that is still fast.
    assert min(times) < 0.5
