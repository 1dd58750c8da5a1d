"""Stand-ins for SLURM's clients, and run folders as jobs and processes leave them."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from quantexp_launchers.slurm.job import own_task

from quantexp.config.compose import compose
from quantexp.launch.attempt import open_run
from quantexp.runs.paths import RunDir, Submission
from quantexp.runs.status import read_status, write_json, write_status
from quantexp.schema import Experiment

from .job_world import World

RECORDED = Path(__file__).parent / "recorded"
KINDS = ("accounting", "plain")
SUBMISSION = "quantexp-sweep"
_CLIENT = """\
#!{python}
import json, os, sys, time
from pathlib import Path
here, name = Path(__file__).parent, Path(__file__).name
with (here / "calls").open("a") as stream:
    stream.write(json.dumps([name, *sys.argv[1:]]) + "\\n")
answer = json.loads((here / f"{{name}}.json").read_text())
time.sleep(answer["delay_s"])
sys.stdout.write(answer["out"])
sys.stderr.write(answer["err"])
sys.exit(answer["code"])
"""


@dataclass(frozen=True)
class FakeSlurm:
    """Clients on PATH that print a fixed answer, whatever their arguments are."""

    folder: Path

    def answer(
        self, client: str, out: str = "", err: str = "", code: int = 0, delay_s: float = 0
    ) -> None:
        content = {"out": out, "err": err, "code": code, "delay_s": delay_s}
        write_json(
            self.folder / f"{client}.json", content
        )  # written whole: a client may be reading it
        file = self.folder / client
        if not file.exists():
            file.write_text(_CLIENT.format(python=sys.executable))
            file.chmod(0o755)

    def replay(self, kind: str, queue: str = "squeue") -> None:
        """Answer with the recorded output of a real cluster (SLURM 22.05, with the commands of the package)."""
        self.answer("squeue", (RECORDED / kind / f"{queue}.out").read_text())
        self.forget(kind)
        self.answer("scancel")

    def forget(self, kind: str) -> None:
        """Let sacct alone answer as recorded; without accounting it fails."""
        errors = RECORDED / kind / "sacct.err"
        err = errors.read_text() if errors.exists() else ""
        self.answer("sacct", (RECORDED / kind / "sacct.out").read_text(), err, int(bool(err)))

    def calls(self, client: str | None = None) -> list[list[str]]:
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        calls = [json.loads(line) for line in lines]
        return [call for call in calls if client in (None, call[0])]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Clients that know no job; the machine's own are hidden."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in os.environ:
        if name.startswith(("SLURM_", "SQUEUE_", "SACCT_", "SCANCEL_")):
            monkeypatch.delenv(name)
    fake = FakeSlurm(folder)
    fake.answer("squeue", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
    fake.answer("sacct", err="Slurm accounting storage is disabled\n", code=1)
    fake.answer("scancel")
    return fake


@pytest.fixture
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without SLURM."""
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))


MakeRun = Callable[..., RunDir]


def queue_line(
    job_id: str,
    state: str,
    *,
    status: str = "0",
    restarts: int = 0,
    end: str = "N/A",
    limit: str = "1:00:00",
    nodes: str = "",
    reason: str = "None",
    name: str = SUBMISSION,
) -> str:
    """One line of squeue's output, with the columns that the package requests."""
    cells = (job_id, state, status, str(restarts), end, limit, nodes, reason, name)
    widths = (40, 24, 12, 12, 24, 24, 128, 128, 128)
    return (
        "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
        + "\n"
    )


@pytest.fixture
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SLURM writes times in the zone of the machine, which is UTC here."""
    with monkeypatch.context() as own:
        own.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def options(text: str) -> dict[str, str]:
    """The #SBATCH lines of a script."""
    lines = [line.split(" ", 1)[1] for line in text.splitlines() if line.startswith("#SBATCH ")]
    words = [shlex.split(line)[0].removeprefix("--").partition("=") for line in lines]
    return {name: value for name, _, value in words}


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    words = ["training=fast", "launcher=slurm", "launcher.max_requeue=2", "capture=tensors"]
    return compose(words, None, {})


@pytest.fixture
def world(
    composed: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., World]:
    def make(num_processes: int = 1) -> World:
        experiment = replace(composed, paths=replace(composed.paths, root=str(tmp_path / "runs")))
        experiment.launcher = replace(composed.launcher, num_processes=num_processes)
        experiment.training = replace(composed.training, micro_batch_size=1)
        with open_run(experiment, "cpu", ["test"]) as (folder, _):
            run = folder.run
        submission = Submission(tmp_path / "runs" / "submissions" / "q-1")
        submission.root.mkdir(parents=True)
        content = {"runs": ["/other", str(run.root)], "snapshot": str(folder.snapshot)}
        write_json(submission.tasks, {**content, "umask": 0o022})
        status = read_status(run.status)
        assert status is not None
        write_status(run.status, replace(status, submission="q-1", task=1))
        for name, value in {"JOB_ID": "12", "ARRAY_JOB_ID": "7", "ARRAY_TASK_ID": "1"}.items():
            monkeypatch.setenv(f"SLURM_{name}", value)
        monkeypatch.setenv("QUANTEXP_START", "12 0")
        return World(own_task(submission, os.environ), experiment, monkeypatch)

    return make
