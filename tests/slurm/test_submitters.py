"""Several simultaneous submitters, and killed ones: each run is in SLURM exactly once, and none is lost."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from quantexp.config.compose import compose
from quantexp.launch.backend import live_job
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State

from .cluster import Cluster
from .launched import HELD, SMALL, status_of, submitted, until, until_state

#: Submits points composed before, once all submitters are ready.
SUBMITTER = """\
import pickle, sys
from pathlib import Path
from rich.console import Console
from quantexp_launchers.slurm.submit import submit_sweep
points = pickle.loads(Path(sys.argv[1]).read_bytes())
print("ready", flush=True)
sys.stdin.readline()
submit_sweep(points, Console(width=200))
"""


@pytest.mark.slow
def test_eight_submitters_of_a_sweep_send_each_run_once(
    accounting: Cluster, tiny_words: list[str], tmp_path: Path
) -> None:
    """The job is only a line of `launcher.setup`: the test counts how often it runs."""
    ran = tmp_path / "ran"
    lines = [f"echo $SLURM_ARRAY_TASK_ID >>{ran}", "exit 0"]
    words = [*tiny_words, *SMALL, HELD, f"paths.root={tmp_path / 'runs'}"]
    one = compose([*words, f"launcher.setup={lines}"], None, {})
    points = [(replace(one, training=replace(one.training, seed=n)), 0) for n in range(20)]
    (tmp_path / "points").write_bytes(pickle.dumps(points))
    submitters = [
        subprocess.Popen(
            [sys.executable, "-c", SUBMITTER, str(tmp_path / "points")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    for each in submitters:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    outputs = [each.communicate("go\n", timeout=120)[0] for each in submitters]
    assert [each.returncode for each in submitters] == [0] * 8
    (array,) = {line.split()[0] for line in accounting.squeue("--format=%F").splitlines()}
    assert len(accounting.states(array)) == 20
    assert sum("20 runs as the array" in output for output in outputs) == 1
    assert sum(output.count("is waiting (JobHeldUser)") for output in outputs) == 7 * 20
    runs = [RunDir(path) for path in (tmp_path / "runs").glob("llama*")]
    assert {status_of(run).job_id for run in runs} == {f"{array}_{task}" for task in range(20)}
    accounting.scontrol("release", array)
    accounting.wait_state(array, "COMPLETED", 60)
    assert Counter(ran.read_text().split()) == Counter(map(str, range(20)))


def test_run_with_a_living_job_is_not_sent_again(
    plain: Cluster, tiny_words: list[str], tmp_path: Path
) -> None:
    """Neither while it is pending nor while it runs, when its job has the folder's lock."""
    words = ["training.iterations=1000000", "capture=off"]
    (run,), (job_id,) = submitted(tiny_words, tmp_path, [*words, HELD])
    again = submitted(tiny_words, tmp_path, words)
    assert again == ([run], ["None"])
    plain.scontrol("release", job_id)
    until_state(run, State.RUNNING)
    assert submitted(tiny_words, tmp_path, words) == ([run], ["None"])
    assert live_job(run, status_of(run)) in {
        f"job {job_id} is running on {node}" for node in ("n1", "n2")
    }
    plain.cancel_all()
    assert until_state(run, State.CANCELLED, within_s=20).job_id == job_id


KILLS_ITS_CALLER = """\
#!/bin/bash
[[ " $* " != *" --test-only "* ]] || exec {sbatch} "$@"
{first}
kill -KILL $PPID
sleep 1
"""


def killed_submission(folder: Path, first: str, words: list[str]) -> None:
    """Submit from a process that its own sbatch kills, after the command `first`."""
    sbatch = folder / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(KILLS_ITS_CALLER.format(sbatch=shutil.which("sbatch"), first=first))
    sbatch.chmod(0o755)
    process = subprocess.run(
        [sys.executable, "-m", "quantexp", *words, *SMALL],
        env={**os.environ, "PATH": f"{sbatch.parent}{os.pathsep}{os.environ['PATH']}"},
        check=False,
    )
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_submitter_killed_after_slurm_accepts_the_job_loses_nothing(
    plain: Cluster, tiny_words: list[str], tmp_path: Path
) -> None:
    words = [*tiny_words, f"paths.root={tmp_path / 'runs'}"]
    killed_submission(tmp_path, f'{shutil.which("sbatch")} "$@"', words)
    (folder,) = (tmp_path / "runs").glob("llama*")
    run = RunDir(folder)
    assert submitted(tiny_words, tmp_path / "runs", []) == ([run], ["None"]), "it is known"
    job_id = until_state(run, State.COMPLETED).job_id
    assert job_id is not None, "written by the job itself"
    assert plain.wait_state(job_id, "COMPLETED") == {job_id: "COMPLETED"}


def test_run_of_a_submitter_killed_before_slurm_accepts_the_job_can_be_sent_again(
    plain: Cluster, tiny_words: list[str], tmp_path: Path
) -> None:
    words = [*tiny_words, f"paths.root={tmp_path / 'runs'}"]
    killed_submission(tmp_path, ":", words)
    assert plain.squeue() == ""
    (run,), (job_id,) = submitted(tiny_words, tmp_path / "runs", [HELD])
    assert status_of(run).job_id == job_id
    assert until("the job", lambda: plain.states(job_id)) == {job_id: "PENDING"}
