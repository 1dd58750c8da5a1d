"""The test clusters behave as the other tests here expect."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from .cluster import KINDS, NODES, Cluster, _tasks

BOTH_NODES = ("--nodes=2", "--ntasks-per-node=1")


def test_a_step_runs_on_both_nodes_under_their_names(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = "echo $SLURMD_NODENAME $(hostname) $(getent hosts n1 n2 | wc -l)"
    cluster.wait_state(
        cluster.sbatch(f"srun bash -c '{command}'", *BOTH_NODES, f"-o{out}"), "COMPLETED"
    )
    nodes, hosts, resolved = zip(
        *(line.split() for line in out.read_text().splitlines()), strict=True
    )
    assert sorted(nodes) == list(NODES)
    assert resolved == ("2", "2")
    # If the kernel allows setup.sh no namespaces, both nodes have this host's name.
    assert set(hosts) in ({"n1", "n2"}, {socket.gethostname()})


def test_each_gpu_is_allocated_to_one_job(cluster: Cluster, tmp_path: Path) -> None:
    jobs = [
        cluster.sbatch(
            "echo $CUDA_VISIBLE_DEVICES; sleep 2",
            "-wn1",
            "--gpus-per-node=2",
            f"-o{tmp_path / name}",
        )
        for name in "ab"
    ]
    for job in jobs:
        cluster.wait_state(job, "COMPLETED")
    devices = [(tmp_path / name).read_text().strip() for name in "ab"]
    assert sorted(devices) == ["0,1", "2,3"]


def test_sacct_works_with_accounting(accounting: Cluster) -> None:
    job = accounting.sbatch("exit 3", "--job-name=told", "-o/dev/null")
    accounting.wait_state(job, "FAILED")
    options = ("--allocations", f"--jobs={job}", "--format=jobname,state,exitcode")
    end = time.monotonic() + 60
    while (
        line := accounting.sacct(*options).strip()
    ) != "told|FAILED|3:0" and time.monotonic() < end:
        time.sleep(0.2)
    assert line == "told|FAILED|3:0"


def test_sacct_fails_without_accounting(plain: Cluster) -> None:
    process = plain.call("sacct")
    assert process.returncode == 1
    assert "Slurm accounting storage is disabled" in process.stderr


def test_jobs_of_a_node_taken_down_are_requeued(cluster: Cluster) -> None:
    job = cluster.sbatch("sleep 60", "-wn2", "-o/dev/null")
    cluster.wait_state(job, "RUNNING")
    cluster.down_node("n2")
    cluster.wait_state(job, "PENDING")
    cluster.start_node("n2")
    cluster.start_now(job)
    cluster.wait_state(job, "RUNNING")
    assert cluster.jobs(job)[0]["Restarts"] == "1"


@pytest.mark.slow
def test_jobs_of_a_killed_node_are_requeued(cluster: Cluster) -> None:
    job = cluster.sbatch("sleep 100", "-wn1", "-o/dev/null")
    cluster.wait_state(job, "RUNNING")
    cluster.kill_node("n1")
    cluster.wait_state(job, "PENDING", within_s=90)
    assert cluster.squeue("--format=%t") == "PD\n"


@pytest.mark.slow
def test_job_in_hi_preempts_one_in_lo_which_is_requeued(cluster: Cluster) -> None:
    low = cluster.sbatch("sleep 60", "-plo", "-wn1", "--exclusive", "-o/dev/null")
    cluster.wait_state(low, "RUNNING")
    high = cluster.sbatch("sleep 60", "-phi", "-wn1", "--exclusive", "-o/dev/null")
    # The partition lo grants 10 s of grace, and the node takes up to KillWait, 30 s, more to release the job.
    cluster.wait_state(high, "RUNNING", within_s=60)
    assert cluster.states(low) == {low: "PENDING"}
    assert cluster.jobs(low)[0]["Restarts"] == "1"


def test_a_constraint_chooses_the_node_that_has_the_feature(cluster: Cluster) -> None:
    job = cluster.sbatch("true", "--constraint=big", "-o/dev/null")
    cluster.wait_state(job, "COMPLETED")
    assert cluster.jobs(job)[0]["NodeList"] == "n2"


def test_states_name_each_task_of_an_array(cluster: Cluster) -> None:
    job = cluster.sbatch("sleep 60", "--array=0-5%2", "-o/dev/null")
    end = time.monotonic() + 40
    while list(cluster.states(job).values()).count("RUNNING") < 2 and time.monotonic() < end:
        time.sleep(0.1)
    states = cluster.states(job)
    assert sorted(states) == [f"{job}_{task}" for task in range(6)]
    assert sorted(states.values()) == ["PENDING"] * 4 + ["RUNNING"] * 2


@pytest.mark.slow
def test_plain_forgets_a_job_that_ended(plain: Cluster) -> None:
    job = plain.sbatch("true", "-o/dev/null")
    plain.wait_state(job, "COMPLETED")
    end = time.monotonic() + 70
    while plain.states(job) and time.monotonic() < end:
        time.sleep(1)
    assert plain.states(job) == {}


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("4", [4]), ("4-7%2", [4, 5, 6, 7]), ("1,3,5-9:2", [1, 3, 5, 7, 9]), ("0-1,4%1", [0, 1, 4])],
)
def test_slurm_s_task_lists_are_read(text: str, tasks: list[int]) -> None:
    assert _tasks(text) == tasks


def test_there_are_two_kinds() -> None:
    assert KINDS == ("accounting", "plain")
