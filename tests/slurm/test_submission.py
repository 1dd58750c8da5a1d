"""Names and values of any kind reach a real SLURM and its runs; stages, limits and refusals."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import sys
from pathlib import Path

import pytest
from quantexp_launchers.slurm.submit import send
from rich.console import Console

from quantexp.cli.main import main
from quantexp.config.compose import compose
from quantexp.config.load import read
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import read_record
from quantexp.runs.status import State

from .cluster import NODES, Cluster
from .launched import (
    ENDLESS,
    HELD,
    SMALL,
    status_of,
    submitted,
    until,
    until_state,
    until_training,
)

#: Stands in for a container's runtime: notes its arguments and runs the command.
APPTAINER = """\
#!/bin/bash
for word; do printf '%s\\0' "$word"; done >>"$NOTES"
while [ "$1" != "$PYTHON" ]; do shift; done
exec "$@"
"""
NASTY = 'it\'s "a" $(touch pwned) `touch pwned` ; & | > # é *'


@pytest.mark.slow
def test_names_and_values_of_any_kind_reach_the_run_whole(
    plain: Cluster, tiny_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container and with a site's own launcher too: spaces, quotes, newlines and commands stay as they are."""
    monkeypatch.chdir(tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "apptainer").write_text(APPTAINER)
    (programs / "apptainer").chmod(0o755)
    value = f"{NASTY}\n#SBATCH --hold\n second line "
    site = {
        "defaults": ["slurm"],
        "environment": {
            "NASTY": value,
            "NOTES": str(tmp_path / "notes"),
            "PYTHON": sys.executable,
        },
        "container": f"/images/{NASTY}.sif",
        "container_mounts": [f"/data {NASTY}:/data"],
        "python": sys.executable,
        "setup": [f'export PATH="{programs}:$PATH"', 'printf %s "$NASTY" >seen'],
        "sbatch": {"comment": NASTY},
    }
    (tmp_path / "conf" / "launcher").mkdir(parents=True)
    (tmp_path / "conf" / "launcher" / "site.yaml").write_text(json.dumps(site))
    root = tmp_path / f"runs {NASTY}"
    quoted = str(root).replace("'", "\\'")
    words = [*tiny_words, "launcher=site", "launcher.cpus_per_process=1", f"paths.root='{quoted}'"]
    assert main(["--config-dir", str(tmp_path / "conf"), *words]) == 0
    (folder,) = root.glob("llama*")
    run = RunDir(folder)
    assert until_state(run, State.COMPLETED, State.FAILED).reason == ""
    assert (tmp_path / "seen").read_text() == value
    assert read(run.config).launcher.environment["NASTY"] == value
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700, "its configuration holds variables"
    assert "second line" not in run.provenance.read_text()
    job_id = str(status_of(run).job_id)
    plain.wait_state(job_id, "COMPLETED")
    assert plain.jobs(job_id)[0]["Comment"].strip() == NASTY
    calls = (tmp_path / "notes").read_text().split("exec\0")[1:]
    assert len(calls) == 3, "begin, the rank, end"
    mounts = ["--bind", f"{root}:{root}", "--bind", f"/data {NASTY}:/data", f"/images/{NASTY}.sif"]
    assert all(call.split("\0")[:5] == mounts for call in calls)
    assert not list(tmp_path.rglob("pwned"))


TWO = [
    "quant=FA_linear_mxfp8",
    *("training.micro_batch_size=1", "training.global_batch_size=2", "training.iterations=3"),
    *("launcher.num_processes=2", "launcher.nodes=2", "launcher.num_threads=1"),
]


@pytest.mark.slow
def test_dead_rank_ends_the_others_at_once_and_is_named(
    plain: Cluster, tiny_words: list[str], tmp_path: Path
) -> None:
    words = [*TWO, *ENDLESS, "training.warmup_iterations=1"]
    (run,), (job_id,) = submitted(tiny_words, tmp_path, words)
    until_training(run)
    record = read_record(run, 1)
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    plain.wait_state(job_id, "FAILED", 30)
    status = status_of(run)
    assert status.state is State.FAILED
    assert status.reason.startswith("rank 1: was ended by SIGKILL (out of memory?); see ")


def test_job_waits_for_a_cluster_in_maintenance(
    plain: Cluster, tiny_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for node in NODES:
        plain.scontrol("update", f"nodename={node}", "state=drain", "reason=maintenance")
    words = [*tiny_words, *SMALL, "launcher.setup=['exit 0']", f"paths.root={tmp_path}"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "the job waits for nodes that are out of service: n[1-2] (maintenance)" in printed
    (run,) = tmp_path.glob("llama*")

    def reason() -> bool:
        assert main(["status", str(tmp_path)]) == 0
        table = capsys.readouterr().out
        return "pending" in table and bool(re.search(r"waiting \(.*(n\[1-2\]|DRAINED)", table))

    until("waiting for the nodes", reason, 30)
    for node in NODES:
        plain.scontrol("update", f"nodename={node}", "state=resume")
    plain.wait_state(str(status_of(RunDir(run)).job_id), "COMPLETED")


def test_later_stage_starts_after_every_run_of_the_first_completed(
    accounting: Cluster, tiny_words: list[str], tmp_path: Path
) -> None:
    def stages(name: str, first_ends: str) -> tuple[str, str]:
        order = tmp_path / name
        common = [*tiny_words, *SMALL, f"paths.root={tmp_path / f'runs of {name}'}"]
        points = [
            (
                compose(
                    [
                        *common,
                        f"quant={quant}",
                        f"launcher.setup=['sleep {1 - stage}','echo {quant} >>{order}','{ends}']",
                    ],
                    None,
                    {},
                ),
                stage,
            )
            for quant, stage, ends in (("FA_mxfp8", 1, "exit 0"), ("bf16", 0, first_ends))
        ]
        sent, _ = send(points, Console(quiet=True))
        return str(sent[0].job_id), str(sent[1].job_id)

    later, first = stages("good", "exit 0")
    never, failed = stages("bad", "exit 1")
    accounting.wait_state(first, "COMPLETED")
    accounting.wait_state(later, "COMPLETED")
    assert (tmp_path / "good").read_text().split() == ["bf16", "FA_mxfp8"]
    accounting.wait_state(failed, "FAILED")
    accounting.wait_state(never, "CANCELLED")
    assert (tmp_path / "bad").read_text().split() == ["bf16"]


def test_sweep_is_an_array_for_each_request_and_one_limit_over_all(
    plain: Cluster, tiny_words: list[str], in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*tiny_words, *SMALL, HELD, "launcher.max_parallel=3"]
    zipped = ["training.seed=1,2,3,4,5,6", "launcher.time_min=5,5,5,6,6,6"]
    together = "sweep.zip=[training.seed,launcher.time_min]"
    assert main(["-m", *words, *zipped, together]) == 0
    output = capsys.readouterr().out
    arrays = sorted({line.split()[0] for line in plain.squeue("--format=%F").splitlines()}, key=int)
    assert len(arrays) == 2
    throttles = [plain.jobs(array)[0]["ArrayTaskThrottle"] for array in arrays]
    assert throttles == ["2", "1"]
    for array, throttle in zip(arrays, throttles, strict=True):
        assert f"3 runs as the array {array}, at most {throttle} at a time" in output
        assert plain.jobs(array)[0]["ArrayTaskId"].startswith("0-2")
    (listed,) = Path("runs/sweeps").iterdir()
    jobs = {row["job_id"] for row in json.loads(listed.read_text())["runs"]}
    assert jobs == {f"{array}_{task}" for array in arrays for task in range(3)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["launcher.partition=nope"],
            "SLURM refuses the job: invalid partition specified: nope; Invalid partition name specified; asked for "
            "launcher.partition=nope, launcher.time_min=30, launcher.nodes=1, launcher.gpus_per_node=0, "
            "launcher.cpus_per_process=1",
        ),
        (
            [
                "launcher.gpus_per_node=9",
                "launcher.num_processes=9",
                "training.global_batch_size=9",
            ],
            "SLURM refuses the job: Requested node configuration is not available; asked for launcher.time_min=30, "
            "launcher.nodes=1, launcher.gpus_per_node=9, launcher.cpus_per_process=1",
        ),
        (
            ["launcher.nodelist=n9"],
            "SLURM refuses the job: Invalid node name specified; asked for",
        ),
        (["launcher.partition=short"], "launcher.time_min"),
    ],
)
def test_impossible_request_is_refused_in_one_line_and_leaves_nothing(
    cluster: Cluster,
    tiny_words: list[str],
    in_tmp: Path,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    assert main([*tiny_words, *SMALL, "training.micro_batch_size=1", *words]) == 1
    output = capfd.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("quantexp: SLURM ")
    assert message in line
    assert not Path("runs").exists()
    assert cluster.squeue() == ""
