"""The script of a job: its text for every key, and what it does, run by bash with stand-ins for Python and SLURM."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from quantexp_launchers.slurm.batch import Batch
from quantexp_launchers.slurm.script import run_script

from quantexp.schema import ContainerRuntime, LauncherConfig

from .conftest import options

#: Everything that a shell, sbatch or Python's search path could misread; but see `check_root`.
NASTY = 'it\'s "a" $(touch pwned) `touch pwned` ; & | > # é *'


def launcher(**keys: Any) -> LauncherConfig:
    return LauncherConfig(kind="slurm", **keys)


def batch(of: LauncherConfig, root: Path = Path("/w/runs"), runs: int = 1, **keys: Any) -> Batch:
    folders = tuple(root / f"run{n}" for n in range(runs))
    return Batch(
        root / "submissions" / "q-1", "q-1", folders, of, root / "snapshots" / "0a", **keys
    )


def srun(text: str) -> list[str]:
    """The command that starts the ranks."""
    (line,) = (line for line in text.splitlines() if line.startswith("srun --unbuffered"))
    return shlex.split(line)


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


# Containers.


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


# What the script does. Python's stand-in notes its arguments and environment; srun's exits with a chosen code.

STAND_IN = """\
#!{python} -IS
import json, os, sys
from pathlib import Path
here = Path({here!r})
name = Path(sys.argv[0]).name
verb = sys.argv[3] if name == "python" and "quantexp_launchers.slurm.job" in sys.argv else name
stdin = sys.stdin.read() if verb == "end" else ""
with (here / "calls").open("a") as calls:
    json.dump({{"verb": verb, "argv": sys.argv[1:], "stdin": stdin, "env": dict(os.environ)}}, calls)
    calls.write("\\n")
if name == "srun" and (here / "wait").exists():
    import signal, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (here / "waits").touch()
    time.sleep(600)
if name == "scontrol":
    print("JobId=12 JobState=RUNNING")
code = here / f"{{verb}}.code"
sys.exit(int(code.read_text()) if code.exists() else 0)
"""


class World:
    """A folder with stand-ins in which scripts run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / f"bin {NASTY.replace('>', '')}"
        self.bin.mkdir()
        for name in ("python", "srun", "scontrol", "apptainer"):
            file = self.bin / name
            file.write_text(STAND_IN.format(python=sys.executable, here=str(folder)))
            file.chmod(0o755)
        self.root = folder / f"runs {NASTY}"
        self.root.mkdir()

    def start(self, of: LauncherConfig, **environment: str) -> subprocess.Popen[str]:
        text = run_script(batch(of, self.root))
        file = self.folder / "script.sh"
        file.write_text(text)
        return subprocess.Popen(
            ["bash", str(file)],
            cwd=self.folder,
            env={
                "PATH": f"{self.bin}:{os.environ['PATH']}",
                "SLURM_JOB_ID": "12",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, of: LauncherConfig, **environment: str) -> int:
        process = self.start(of, **environment)
        output, _ = process.communicate(timeout=240)
        assert not (self.folder / "pwned").exists(), output
        return process.returncode

    def exits(self, **codes: int) -> None:
        for verb, code in codes.items():
            (self.folder / f"{verb}.code").write_text(str(code))

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]

    @property
    def verbs(self) -> list[str]:
        words = {"scontrol": 2}
        return [
            " ".join([call["verb"], *call["argv"][: words.get(call["verb"], 0)]])
            for call in self.calls
        ]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def own(world: World) -> Callable[..., LauncherConfig]:
    """Launchers with the stand-in for Python."""
    return lambda **keys: launcher(python=str(world.bin / "python"), **keys)


ORDER = ["begin", "srun", "scontrol show job", "end"]


def test_run_that_completes_exits_with_0(world: World, own: Callable[..., LauncherConfig]) -> None:
    assert world.run(own()) == 0
    assert sorted(world.verbs) == sorted(ORDER)
    assert world.verbs[:2] == ORDER[:2]
    end = next(call for call in world.calls if call["verb"] == "end")
    assert end["argv"][-1] == "0"
    assert end["stdin"] == "JobId=12 JobState=RUNNING\n"


@pytest.mark.parametrize(
    ("codes", "exit_code", "verbs"),
    [
        ({"begin": 75}, 0, ["begin"]),
        ({"begin": 76}, 1, ["begin", "scontrol requeue 12"]),
        ({"begin": 1}, 1, ["begin"]),
        ({"begin": 143}, 1, ["begin"]),
        ({"srun": 137, "end": 1}, 1, ORDER),
        ({"srun": 137}, 0, ORDER),
        ({"end": 1}, 1, ORDER),
        ({"end": 127}, 1, ORDER),
        ({"srun": 130, "end": 76}, 1, [*ORDER, "scontrol requeue 12"]),
    ],
)
def test_ends_of_the_script(
    world: World,
    own: Callable[..., LauncherConfig],
    codes: dict[str, int],
    exit_code: int,
    verbs: list[str],
) -> None:
    world.exits(**codes)
    assert world.run(own()) == exit_code
    assert sorted(world.verbs) == sorted(verbs)
    for call in world.calls:
        if call["verb"] == "end":
            assert call["argv"][-1] == str(codes.get("srun", 0))


def test_task_of_an_array_queries_itself_alone(
    world: World, own: Callable[..., LauncherConfig]
) -> None:
    world.exits(end=76)
    world.run(own(), SLURM_ARRAY_JOB_ID="12", SLURM_ARRAY_TASK_ID="3")
    queries = [call["argv"] for call in world.calls if call["verb"] == "scontrol"]
    assert sorted(queries) == [["requeue", "12_3"], ["show", "job", "--oneliner", "12_3"]]


def test_script_that_is_terminated_still_records_how_the_run_ended(
    world: World, own: Callable[..., LauncherConfig]
) -> None:
    """SLURM sends SIGTERM to all processes of the job, and again while the last lines run."""
    (world.folder / "wait").touch()
    world.exits(end=1)
    process = world.start(own())
    until = time.monotonic() + 120
    while not (world.folder / "waits").exists() and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    while process.poll() is None and time.monotonic() < until:
        if len(world.calls) > 2:
            os.killpg(process.pid, signal.SIGTERM)
        time.sleep(0.02)
    process.communicate(timeout=120)
    assert process.returncode == 1
    assert sorted(world.verbs) == sorted(ORDER)


def test_nothing_of_the_configuration_reaches_the_shell(
    world: World, own: Callable[..., LauncherConfig]
) -> None:
    value = f"{NASTY}\n#SBATCH --hold\n"
    config = own(
        partition=NASTY,
        constraint=NASTY,
        environment={"NASTY": value},
        srun_args=[f"--comment={NASTY}"],
        sbatch={"comment": NASTY},
        mail_user=NASTY,
    )
    assert world.run(config) == 0
    submission = str(world.root / "submissions" / "q-1")
    begin, ranks = world.calls[:2]
    assert begin["argv"] == ["-m", "quantexp_launchers.slurm.job", "begin", submission]
    assert ranks["argv"][-6:] == [
        *(str(world.bin / "python"), "-u", "-m", "quantexp_launchers.slurm.job", "rank", submission)
    ]
    assert f"--comment={NASTY}" in ranks["argv"]
    for call in (begin, ranks):
        assert call["env"]["NASTY"] == value
        assert call["env"]["PYTHONPATH"] == str(world.root / "snapshots" / "0a")
    text = run_script(batch(config, world.root))
    assert options(text)["partition"] == options(text)["comment"] == NASTY
    assert options(text)["output"] == f"{submission}/%j_0_log.out"


def test_options_of_a_container_do_not_reach_the_shell_either(
    world: World, own: Callable[..., LauncherConfig]
) -> None:
    config = own(container=NASTY, container_mounts=[NASTY])
    assert world.run(config) == 0
    begin = world.calls[0]
    root = f"{world.root}:{world.root}"
    assert begin["argv"][:6] == ["exec", "--bind", root, "--bind", NASTY, NASTY]
    assert begin["argv"][6] == str(world.bin / "python")


def test_setup_lines_are_shell_and_see_the_environment(
    world: World, own: Callable[..., LauncherConfig]
) -> None:
    lines = ['export SEEN="$GIVEN and more"', "if true", "then export TWO=2", "fi"]
    assert world.run(own(environment={"GIVEN": "a b"}, setup=lines)) == 0
    assert world.calls[0]["env"]["SEEN"] == "a b and more"
    assert world.calls[0]["env"]["TWO"] == "2"


def test_snapshot_comes_before_whatever_else_is_on_the_search_path(
    world: World, own: Callable[..., LauncherConfig]
) -> None:
    world.run(own(setup=["export PYTHONPATH=/modules:$PYTHONPATH"]), PYTHONPATH="/mine")
    path = world.calls[0]["env"]["PYTHONPATH"]
    assert path == f"{world.root}/snapshots/0a:/modules:/mine"
    assert world.calls[0]["env"]["PYTHONSAFEPATH"] == "1"


def test_module_that_cannot_be_loaded_ends_the_job_before_the_run_begins(
    world: World, own: Callable[..., LauncherConfig]
) -> None:
    module = 'module() { echo "$2" >>loaded; [ "$2" != cuda/99 ]; }\nexport -f module\n'
    (world.folder / "modules.sh").write_text(module)
    for modules, code in ((["gcc", NASTY], 0), (["gcc", "cuda/99", "never"], 1)):
        config = own(modules=modules)
        assert world.run(config, BASH_ENV=str(world.folder / "modules.sh")) == code
    assert (world.folder / "loaded").read_text().splitlines() == ["gcc", NASTY, "gcc", "cuda/99"]
    assert world.verbs.count("begin") == 1


def test_only_the_request_of_a_batch_determines_its_script() -> None:
    """So a plan shows the exact script: it does not contain the runs, stage and lane of a batch of one."""
    one = batch(launcher())
    assert run_script(one) == run_script(replace(one, runs=(Path("/elsewhere"),), stage=1, lane=2))
