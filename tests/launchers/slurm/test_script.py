"""The script of a job: its text for every key."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from quantexp_launchers.slurm.script import run_script

from quantexp.schema import ContainerRuntime

from .conftest import options
from .scripts import batch, launcher, srun


def test_plain_run_requests_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    assert run_script(batch(launcher())) == (
        "#!/bin/bash\n\n# Parameters\n"
        "#SBATCH --error=/w/runs/submissions/q-1/%j_0_log.err\n"
        "#SBATCH --job-name=q-1\n"
        "#SBATCH --nodes=1\n"
        "#SBATCH --ntasks-per-node=1\n"
        "#SBATCH --open-mode=append\n"
        "#SBATCH --output=/w/runs/submissions/q-1/%j_0_log.out\n"
        "#SBATCH --requeue\n"
        "#SBATCH --signal=USR2@300\n"
        "#SBATCH --time=60\n"
        "\n# setup\n"
        "umask 077\n"
        "trap true TERM  # the lines after the ranks are run even where the scheduler ends the job\n"
        'export PYTHONPATH=/w/runs/snapshots/0a"${PYTHONPATH:+:$PYTHONPATH}"\n'
        "export PYTHONSAFEPATH=1\n"
        "export PYTHONDONTWRITEBYTECODE=1\n"
        "job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}\n"
        'export QUANTEXP_START="$SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0}"\n'
        "/venv/bin/python -m quantexp_launchers.slurm.job begin /w/runs/submissions/q-1 && begun=0 || begun=$?\n"
        "[ $begun -ne 75 ] || exit 0\n"
        "[ $begun -ne 76 ] || scontrol requeue $job\n"
        "[ $begun -eq 0 ] || exit 1\n"
        "\n# command\n"
        "export SUBMITIT_EXECUTOR=slurm\n"
        "srun --unbuffered --output /w/runs/submissions/q-1/%j_%t_log.out --error "
        "/w/runs/submissions/q-1/%j_%t_log.err --kill-on-bad-exit=1 /venv/bin/python -u -m "
        "quantexp_launchers.slurm.job rank /w/runs/submissions/q-1\n\n"
        "\n# teardown\n"
        "code=$?\n"
        "trap '' TERM  # nor are the commands of these lines ended\n"
        "/venv/bin/python -m quantexp_launchers.slurm.job end /w/runs/submissions/q-1 $code "
        "< <(scontrol show job --oneliner $job) && code=0 || code=$?\n"
        "[ $code -ne 76 ] || scontrol requeue $job\n"
        "[ $code -eq 0 ] || exit 1\n"
        "exit 0"
    )


def test_every_key_of_a_request_reaches_sbatch() -> None:
    config = launcher(
        num_processes=8,
        nodes=2,
        gpus_per_node=4,
        gpu_type="h100",
        partition="gpu",
        account="research",
        qos="urgent",
        time_min=90,
        cpus_per_process=6,
        mem_gb=100.5,
        constraint="ib&nvme",
        exclude="n[7-9]",
        nodelist="n1",
        reservation="week",
        mail_user="a@b.example",
        mail_type="END,FAIL",
        sbatch={"exclusive": "true", "licenses": "matlab:1"},
        max_requeue=0,
        signal_s=300,
    )
    sbatch_options = options(run_script(batch(config, runs=5, throttle=2, dependency="afterok:7")))
    folder = "/w/runs/submissions/q-1"
    assert sbatch_options == {
        "account": "research",
        "array": "0-4%2",
        "constraint": "ib&nvme",
        "cpus-per-task": "6",
        "dependency": "afterok:7",
        "error": f"{folder}/%A_%a_0_log.err",
        "exclude": "n[7-9]",
        "exclusive": "",
        "gpus-per-node": "h100:4",
        "job-name": "q-1",
        "kill-on-invalid-dep": "yes",
        "licenses": "matlab:1",
        "mail-type": "END,FAIL",
        "mail-user": "a@b.example",
        "mem": f"{-(-100_500_000_000 // 2**20)}M",
        "no-requeue": "",
        "nodelist": "n1",
        "nodes": "2",
        "ntasks-per-node": "4",
        "open-mode": "append",
        "output": f"{folder}/%A_%a_0_log.out",
        "partition": "gpu",
        "qos": "urgent",
        "reservation": "week",
        "signal": "USR2@300",
        "time": "90",
    }


def test_all_memory_of_a_node_is_requested_by_0() -> None:
    assert options(run_script(batch(launcher(mem_gb=0.0))))["mem"] == "0"
    assert "mem" not in options(run_script(batch(launcher(mem_gb=None))))


def test_array_runs_all_at_once_without_a_limit() -> None:
    assert options(run_script(batch(launcher(), runs=3)))["array"] == "0-2%3"
    assert "array" not in options(run_script(batch(launcher(), runs=1)))


@pytest.mark.parametrize(("time_min", "signal_s"), [(1, 30), (2, 60), (9, 270), (60, 300)])
def test_warning_comes_in_the_second_half_of_a_short_run(time_min: int, signal_s: int) -> None:
    assert options(run_script(batch(launcher(time_min=time_min))))["signal"] == f"USR2@{signal_s}"


def test_requested_threads_take_precedence_over_those_of_the_cores() -> None:
    config = launcher(cpus_per_process=3, environment={"OMP_NUM_THREADS": "1"})
    lines = run_script(batch(config)).splitlines()
    assert [line for line in lines if "OMP_NUM_THREADS" in line] == ["export OMP_NUM_THREADS=1"]


def test_further_arguments_of_srun_come_after_our_own() -> None:
    words = srun(run_script(batch(launcher(srun_args=["--mpi=none", "--x=a b"]))))
    assert words[words.index("--kill-on-bad-exit=1") + 1 :][:2] == ["--mpi=none", "--x=a b"]


@pytest.mark.parametrize("runtime", [ContainerRuntime.apptainer, ContainerRuntime.singularity])
def test_apptainer_starts_every_python_of_the_script(runtime: ContainerRuntime) -> None:
    config = launcher(
        container="/images/a b.sif",
        container_runtime=runtime,
        container_mounts=["/data:/data:ro"],
        python="python3",
        gpus_per_node=1,
    )
    text = run_script(batch(config))
    inside = [runtime.value, "exec", "--nv", "--bind", "/w/runs:/w/runs"]
    inside += ["--bind", "/data:/data:ro", "/images/a b.sif", "python3"]
    task = [*inside, "-u", "-m", "quantexp_launchers.slurm.job", "rank", "/w/runs/submissions/q-1"]
    assert srun(text)[-len(task) :] == task
    steps = [line for line in text.splitlines() if "quantexp_launchers.slurm.job" in line]
    assert len(steps) == 3, "begin, rank, end"
    assert all(shlex.join(inside) in line for line in steps)


def test_cpu_run_requests_no_gpu_from_apptainer() -> None:
    assert "--nv" not in run_script(batch(launcher(container="a.sif", python="python3")))


def test_srun_starts_ranks_and_both_ends_with_pyxis() -> None:
    config = launcher(
        container="registry#image:1",
        container_runtime=ContainerRuntime.pyxis,
        container_mounts=["/data:/data"],
        python="python3",
    )
    text = run_script(batch(config))
    plugin = [
        "--container-image=registry#image:1",
        "--container-mounts=/w/runs:/w/runs,/data:/data",
    ]
    words = srun(text)
    assert words[words.index("--kill-on-bad-exit=1") + 1 :][:3] == [*plugin, "python3"]
    begin, _, end = (line for line in text.splitlines() if "quantexp_launchers.slurm.job" in line)
    step = [
        "srun",
        "--ntasks=1",
        "--nodes=1",
        "--overlap",
        *plugin,
        "python3",
        "-m",
        "quantexp_launchers.slurm.job",
    ]
    assert shlex.split(begin)[: len(step) + 1] == [*step, "begin"]
    assert shlex.split(end)[: len(step) + 1] == [*step, "end"]


def test_only_the_request_of_a_batch_determines_its_script() -> None:
    """So a plan shows the exact script: it does not contain the runs, stage and lane of a batch of one."""
    one = batch(launcher())
    assert run_script(one) == run_script(replace(one, runs=(Path("/elsewhere"),), stage=1, lane=2))
