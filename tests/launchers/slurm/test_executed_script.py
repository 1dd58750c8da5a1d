"""What the script of a job does, run by bash with stand-ins for Python and SLURM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quantexp_launchers.slurm.script import run_script

from quantexp.schema import LauncherConfig

from .conftest import options
from .scripts import batch, launcher

#: Everything that a shell, sbatch or Python's search path could misread; but see `check_root`.
NASTY = 'it\'s "a" $(touch pwned) `touch pwned` ; & | > # é *'


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
