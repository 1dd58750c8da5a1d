"""The state of a run of this machine, from its folder and its lock together."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from quantexp_launchers.local import standing as local
from quantexp_launchers.local.standing import workers

from quantexp.launch.ledger.standing import settle, standing, standings
from quantexp.runs.fencing import Claim, own_claim
from quantexp.runs.lock import hold, take_lock
from quantexp.runs.paths import RunDir, RunsRoot, SweepFiles
from quantexp.runs.status import State, Status, read_status, write_json, write_status
from tests.launchers.slurm.conftest import MakeRun
from tests.launchers.slurm.conftest import no_slurm as no_slurm

HERE = platform.node()
#: No process has this number: the kernel's largest is 2^22.
NO_PID = 2**22 + 1


def test_run_whose_lock_is_held_runs(make_run: MakeRun, no_slurm: None) -> None:
    run = make_run(host=HERE, pid=os.getpid(), iteration=2, started="2026-01-01T00:00:00+00:00")
    lock = take_lock(run)
    entry = standing(run)
    os.close(lock)
    assert (entry.state, entry.alive, entry.reason) == (State.RUNNING, True, "")
    assert entry.where == f"here, process {os.getpid()}"
    assert (entry.pace.loss, entry.pace.tokens_per_s, entry.pace.time_left_s) == (4.75, 128.0, 12.0)


def test_locked_run_that_is_pending_is_starting(make_run: MakeRun) -> None:
    run = make_run(state=State.PENDING, host=HERE)
    lock = take_lock(run)
    assert (standing(run).state, standing(run).where) == (State.PENDING, "here, starting")
    os.close(lock)


def test_run_whose_process_is_gone_was_preempted(make_run: MakeRun) -> None:
    entry = standing(make_run(host=HERE, pid=NO_PID, iteration=3))
    assert (entry.state, entry.alive, entry.where) == (State.PREEMPTED, False, "")
    assert entry.reason == (
        f"died without recording why: process {NO_PID} on {HERE} is gone (killed, or machine failure), at iteration 3 "
        "of 8"
    )
    assert entry.is_unrecorded_end


def test_run_prepared_again_since_its_status_was_read_is_not_dead(make_run: MakeRun) -> None:
    run = make_run(host=HERE, pid=NO_PID, iteration=3)
    old_status = read_status(run.status)
    assert old_status is not None
    write_status(run.status, Status(State.PENDING, host=HERE, created="2026-01-01T00:00:00+00:00"))
    (entry,) = local.standings([(run, old_status)])
    assert (entry.state, entry.alive, entry.reason) == (State.PENDING, False, local.NOT_SCHEDULED)


def test_process_id_reused_by_another_process_is_not_the_run(make_run: MakeRun) -> None:
    assert standing(make_run(host=HERE, pid=os.getpid())).state is State.PREEMPTED


def test_prepared_run_that_no_process_starts_is_not_scheduled(make_run: MakeRun) -> None:
    entry = standing(make_run(state=State.PENDING, host=HERE))
    assert (entry.state, entry.alive) == (State.PENDING, False)
    assert entry.reason == "prepared, but no process starts it; quantexp resume does"
    assert not entry.is_unrecorded_end
    refused = standing(make_run("a-1", State.PENDING, host=HERE, reason="SLURM refused it"))
    assert (refused.state, refused.alive, refused.reason) == (
        State.PENDING,
        False,
        "SLURM refused it",
    )


def test_prepared_run_waits_for_its_turn_in_a_sweep_that_goes_on(make_run: MakeRun) -> None:
    runs = [make_run(name, State.PENDING, host=HERE) for name in ("a-1", "b-2", "c-3")]
    files = SweepFiles(RunsRoot(runs[0].root.parent).sweeps / "20261121_7.json")
    files.listing.parent.mkdir()
    rows = [
        {"run": "a-1", "state": "pending"},
        {"run": "b-2", "state": "failed"},
        {"run": None, "state": "pending"},
    ]
    write_json(files.listing, {"runs": rows})
    write_json(files.listing.with_name("broken.json"), [])
    locks = [hold(SweepFiles(file).lock) for file in files.listing.parent.glob("*.json")]
    entries = standings(runs)
    assert [(each.alive, each.where) for each in entries] == [
        (True, "waiting in sweep 20261121_7"),
        (False, ""),
        (False, ""),
    ]
    for lock in locks:
        os.close(lock)
    assert not standing(runs[0]).alive


def test_run_of_another_machine_is_alive_while_its_claim_exists(make_run: MakeRun) -> None:
    run = make_run(host="far", pid=7)
    write_json(run.claim, vars(Claim("0123", "far", 6, "12", "another boot", "another machine")))
    entry = standing(run)
    assert (entry.state, entry.alive, entry.where) == (State.RUNNING, True, "far, process 7")
    run.claim.unlink()
    assert standing(run).state is State.PREEMPTED
    assert "process 7 on far is gone" in standing(run).reason


def test_recorded_end_of_a_killed_run_frees_it_on_every_machine(make_run: MakeRun) -> None:
    run = make_run(host=HERE, pid=NO_PID)
    write_json(run.claim, vars(own_claim()))
    settle(standing(run))
    assert not run.claim.exists()


@pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED, State.PREEMPTED, State.CANCELLED])
def test_recorded_end_is_final(make_run: MakeRun, state: State) -> None:
    entry = standing(make_run(state=state, reason="so it was", host=HERE, pid=NO_PID))
    assert (entry.state, entry.alive, entry.reason) == (state, False, "so it was")
    assert not entry.is_unrecorded_end


def test_run_that_ends_during_the_look_is_not_lost(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(host=HERE, pid=NO_PID)

    def ends(run: RunDir) -> bool:
        write_status(run.status, Status(State.COMPLETED))
        return False

    monkeypatch.setattr("quantexp_launchers.local.standing.is_locked", ends)
    assert standing(run).state is State.COMPLETED


#: Starts a child with its own command line, both with the folder argv[1] in it, and waits.
PAIR = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[2], *sys.argv[1:]])
print(child.pid, flush=True); sys.stdin.read()
"""


@contextmanager
def pair(run: RunDir) -> Iterator[tuple[int, int]]:
    """A stand-in for torchrun, and its rank."""
    words = [str(run.root), "import time; time.sleep(600)", "-m", "quantexp.training.worker"]
    command = [sys.executable, "-c", PAIR, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        rank = psutil.Process(int(process.stdout.readline()))
        yield process.pid, rank.pid
        rank.kill()


def test_first_worker_of_a_locked_run_is_the_one_to_end(make_run: MakeRun) -> None:
    run, other = make_run("a-1"), make_run("b-2")
    with pair(run) as (torchrun, rank):
        assert workers([run, other]) == {}, "nobody has the lock: these are not its workers"
        locks = [take_lock(each) for each in (run, other)]
        linked = run.root.with_name("link")
        linked.symlink_to(run.root)
        for each in (run, RunDir(linked)):
            found = workers([each, other])
            assert {root: worker.pid for root, worker in found.items()} == {each.root: torchrun}
        psutil.Process(torchrun).kill()
        psutil.wait_procs([psutil.Process(torchrun)], 0.1)
        assert [worker.pid for worker in workers([run]).values()] == [rank], "it outlived torchrun"
        for lock in locks:
            os.close(lock)
    assert workers([]) == {}
