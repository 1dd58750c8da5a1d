"""Submitting to SLURM with stand-ins for its clients: the check before it, the messages of refusals, and the files
that a submission leaves behind.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quantexp_launchers.slurm import scheduler
from quantexp_launchers.slurm.batch import Batch
from quantexp_launchers.slurm.scheduler import refusal, require_slurm
from quantexp_launchers.slurm.script import run_script
from quantexp_launchers.slurm.submit import check_batch, submit_batch

from quantexp.errors import RunError
from quantexp.runs.paths import Submission
from quantexp.schema import LauncherConfig

#: Notes how it was called, then runs the test's lines.
CLIENT = """\
#!{python} -IS
import json, os, sys
mask = os.umask(0); os.umask(mask)
text = sys.stdin.read() if "sbatch" in sys.argv[0] else ""
with open({calls!r}, "a") as calls:
    json.dump({{"argv": sys.argv, "stdin": text, "env": dict(os.environ), "umask": mask}}, calls)
    calls.write("\\n")
{does}
"""
TAKES = 'if "--test-only" not in sys.argv: print("7")'

Calls = Callable[..., list[dict[str, Any]]]
Client = Callable[..., None]


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    """Puts a stand-in for one of SLURM's clients on PATH; submitting works without further calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")

    def put(name: str, does: str = "") -> None:
        file = folder / name
        file.write_text(
            CLIENT.format(python=sys.executable, calls=str(tmp_path / "calls"), does=does)
        )
        file.chmod(0o755)

    for name in ("sbatch", "srun", "squeue", "scancel"):
        put(name, TAKES if name == "sbatch" else "")
    put("sinfo", "print('lo* infinite')")
    return put


@pytest.fixture
def calls(tmp_path: Path, client: Client) -> Calls:
    """The calls of the stand-ins."""

    def read(name: str = "sbatch") -> list[dict[str, Any]]:
        lines = (tmp_path / "calls").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return [call for call in records if Path(call["argv"][0]).name == name]

    return read


def launcher(**keys: Any) -> LauncherConfig:
    return LauncherConfig(kind="slurm", **keys)


@pytest.fixture
def batch(tmp_path: Path) -> Callable[..., Batch]:
    def make(runs: int = 1, umask: int = 0o022, **keys: Any) -> Batch:
        root = tmp_path / "runs"
        folder = root / "submissions" / "q-1"
        folder.mkdir(parents=True, exist_ok=True)
        folders = tuple(root / f"run{n}" for n in range(runs))
        snapshot = root / "snapshots" / "0a"
        return Batch(folder, "q-1", folders, launcher(**keys), snapshot, umask)

    return make


def test_missing_client_is_named(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    require_slurm()
    (tmp_path / "bin" / "squeue").unlink()
    with pytest.raises(RunError) as caught:
        require_slurm()
    assert str(caught.value) == (
        "there is no SLURM here (squeue is not on PATH); submit from a login node, or leave launcher=slurm out to run "
        "on this machine"
    )


def test_scheduler_checks_the_exact_script(
    client: Client, calls: Calls, batch: Callable[..., Batch]
) -> None:
    one = batch(3, partition="lo")
    check_batch(one)
    (call,) = calls()
    assert call["argv"][1:] == ["--test-only"]
    assert call["stdin"] == run_script(one)


#: Stands in for an sbatch on whose cluster no node in service can run the job.
NO_NODES = (
    'sys.exit("allocation failure: Requested node configuration is not available") '
    'if "--test-only" in sys.argv else print("7")'
)


def test_batch_that_only_nodes_out_of_service_can_run_is_submitted_with_a_notice(
    client: Client, calls: Calls, batch: Callable[..., Batch]
) -> None:
    client("sbatch", NO_NODES)
    client("sinfo", 'print("n[1-2] (maintenance)\\nlo* infinite")')
    notice = "the job waits for nodes that are out of service: n[1-2] (maintenance), lo* infinite"
    assert check_batch(batch(partition="lo")) == notice
    assert "--partition=lo" in calls("sinfo")[0]["argv"]
    assert submit_batch(batch()) == ["7"]


def test_batch_that_no_node_can_run_is_refused(client: Client, batch: Callable[..., Batch]) -> None:
    client("sbatch", NO_NODES)
    client("sinfo", "pass")
    with pytest.raises(
        RunError, match="SLURM refuses the job: Requested node configuration is not"
    ):
        check_batch(batch(mem_gb=5000.0))


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition name specified\n",
            "invalid partition specified: nope; Invalid partition name specified",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid account\n",
            "Invalid account",
        ),
        (
            "sbatch: unrecognized option '--foo=1'\nTry \"sbatch --help\" for more information\n",
            "unrecognized option '--foo=1'",
        ),
        ("sbatch: error: twice\nsbatch: error: twice\n\n", "twice"),
        ("", "it gives no reason"),
    ],
)
def test_refusal_is_reported_once_without_noise(output: str, reason: str) -> None:
    assert refusal(output) == reason


def test_refused_request_is_named_by_its_configuration_keys(
    client: Client, batch: Callable[..., Batch]
) -> None:
    client("sbatch", 'sys.stderr.write("allocation failure: Too much\\n"); sys.exit(1)')
    with pytest.raises(RunError) as caught:
        check_batch(batch(partition="lo", gpus_per_node=9, sbatch={"foo": "1"}))
    assert str(caught.value) == (
        "SLURM refuses the job: Too much; asked for launcher.partition=lo, launcher.time_min=60, launcher.nodes=1, "
        "launcher.gpus_per_node=9, launcher.sbatch.foo=1"
    )


def test_wait_for_a_silent_controller_has_a_limit(
    client: Client, batch: Callable[..., Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    client("sbatch", "import time; time.sleep(60)")
    monkeypatch.setattr(scheduler, "CLIENT_S", 0.5)
    for ask in (check_batch, submit_batch):
        with pytest.raises(RunError, match=r"the SLURM controller does not answer within 30 s"):
            ask(batch())


@pytest.mark.parametrize(
    ("partition", "time_min", "words"),
    [
        (None, 5, None),
        (None, 6, "must be at most 5 in the partition short, got 6"),
        ("short", 6, "must be at most 5 in the partition short, got 6"),
        ("long", 10_000, None),
        ("days", 2880, None),
        ("days", 2881, "must be at most 2880 in the partition days, got 2881"),
        ("short,long", 6, None),
        ("short,days", 3000, "must be at most 2880 in the partition short,days, got 3000"),
        ("unknown", 6, None),
    ],
)
def test_time_beyond_a_partition_s_limit_is_refused_though_sbatch_would_accept_it(
    client: Client,
    batch: Callable[..., Batch],
    partition: str | None,
    time_min: int,
    words: str | None,
) -> None:
    client("sinfo", "print('short* 5:00'); print('long infinite'); print('days 2-00:00:00')")
    one = batch(partition=partition, time_min=time_min)
    if words is None:
        check_batch(one)
        return
    with pytest.raises(RunError) as caught:
        check_batch(one)
    assert str(caught.value) == f"SLURM would never start the job: launcher.time_min {words}"


def test_quality_of_service_may_have_another_limit(
    client: Client, batch: Callable[..., Batch]
) -> None:
    client("sinfo", "print('short* 5:00')")
    check_batch(batch(qos="long", time_min=600))


def test_unknown_limits_refuse_nothing(client: Client, batch: Callable[..., Batch]) -> None:
    client("sinfo", "sys.exit(1)")
    check_batch(batch(time_min=600))


def test_ids_are_those_of_the_array_s_tasks(client: Client, batch: Callable[..., Batch]) -> None:
    assert submit_batch(batch(3)) == ["7_0", "7_1", "7_2"]
    assert submit_batch(batch(1)) == ["7"]
    client("sbatch", 'print("8;cluster")')
    assert submit_batch(batch(1)) == ["8"]


def test_sent_script_is_the_planned_one(
    client: Client, calls: Calls, batch: Callable[..., Batch]
) -> None:
    several = batch(3, partition="lo")
    submit_batch(several)
    (call,) = calls()
    assert call["argv"][1:] == ["--parsable"]
    assert call["stdin"] == run_script(several)
    assert Submission(several.folder).script.read_text() == run_script(several)


def test_files_of_a_submission_are_private(
    client: Client, calls: Calls, batch: Callable[..., Batch]
) -> None:
    one = batch(2)
    before = os.umask(0o022)
    try:
        submit_batch(one)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    (call,) = calls()
    assert call["umask"] == 0o077, "SLURM hands it on to the job, whose output it creates"
    (file,) = one.folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_refused_submission_is_reported_once_and_not_by_sbatch_too(
    client: Client, batch: Callable[..., Batch], capfd: pytest.CaptureFixture[str]
) -> None:
    client("sbatch", 'sys.stderr.write("sbatch: error: No more\\n"); sys.exit(1)')
    with pytest.raises(RunError, match=r"^SLURM refuses the job: No more; asked for launcher\.t"):
        submit_batch(batch())
    assert capfd.readouterr() == ("", "")


def test_answer_without_a_number_is_a_refusal(client: Client, batch: Callable[..., Batch]) -> None:
    client("sbatch", 'print("thank you")')
    with pytest.raises(RunError, match="sbatch must answer with the job's id, got 'thank you'"):
        submit_batch(batch())


def test_variables_cannot_change_the_request(
    client: Client,
    calls: Calls,
    batch: Callable[..., Batch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = {
        "SBATCH_PARTITION": "theirs",
        "SBATCH_ACCOUNT": "mine",
        "SBATCH_WAIT": "1",
        "SBATCH_TIMELIMIT": "1",
        "SLURM_NTASKS": "64",
        "SLURM_JOB_ID": "3",
        "SLURM_CONF": "/etc/slurm.conf",
        "SUBMITIT_EXECUTOR": "local",
        "MY_OWN": "kept",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    check_batch(batch(partition="ours"))
    submit_batch(batch(partition="ours"))
    assert len(calls()) == 2
    for call in calls():
        env = call["env"]
        assert {name for name in environment if name in env} == {
            "SBATCH_ACCOUNT",
            "SLURM_CONF",
            "MY_OWN",
        }
    assert all(os.environ[name] == value for name, value in environment.items())
