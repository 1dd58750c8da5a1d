"""A preparation of three files, and a stand-in for sbatch that keeps what is sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quantexp.cli.main import main
from tests.data.prepare.made import lines, rows, texts
from tests.launchers.slurm.conftest import FakeSlurm

_SBATCH = """\
#!{python} -IS
import sys
from pathlib import Path
here, text = Path(__file__).parent, sys.stdin.read()
if "--test-only" in sys.argv:
    (here / "checked").write_text(text)
    sys.exit()
number = 7 + len(list(here.glob("sent*")))
if (here / "refuse").exists() and (here / "refuse").read_text() == str(number):
    sys.exit("sbatch: error: No more jobs")
(here / f"sent{{number}}").write_text(text)
print(number)
"""


@dataclass(frozen=True)
class Cluster:
    """SLURM's clients as stand-ins, and the command line."""

    slurm: FakeSlurm
    #: The words of the command that is submitted.
    words: list[str]

    def sent(self) -> list[str]:
        """The scripts that were submitted."""
        return [path.read_text() for path in sorted(self.slurm.folder.glob("sent*"))]

    def checked(self) -> str:
        """The script of the last check."""
        return (self.slurm.folder / "checked").read_text()

    def refuse(self, number: int) -> None:
        """Refuse the job that would have this number; the first is 7."""
        (self.slurm.folder / "refuse").write_text(str(number))

    def names(self) -> list[str]:
        """The submissions, the oldest first."""
        folder = Path("runs/submissions")
        paths = (
            sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime_ns) if folder.exists() else []
        )
        return [path.name for path in paths]

    def plan(self, file: str = "plan.json") -> dict[str, Any]:
        """The plan of the newest submission, or its work."""
        content = json.loads((Path("runs/submissions") / self.names()[-1] / file).read_text())
        assert isinstance(content, dict)
        return content


@pytest.fixture
def clients(in_tmp: Path, slurm: FakeSlurm) -> FakeSlurm:
    """Stand-ins for the clients that a submission needs."""
    for name in ("srun", "sinfo"):
        slurm.answer(name)
    sbatch = slurm.folder / "sbatch"
    sbatch.write_text(_SBATCH.format(python=sys.executable))
    sbatch.chmod(0o755)
    return slurm


@pytest.fixture
def cluster(in_tmp: Path, clients: FakeSlurm) -> Cluster:
    """Files of 30, 20 and 10 documents in `raw`."""
    (in_tmp / "raw").mkdir()
    for index, number in enumerate((30, 20, 10)):
        content = lines(rows(texts(number, seed=index)))
        (in_tmp / "raw" / f"{index}.jsonl").write_bytes(content)
    words = ["prepare", "dataset=dolma", "dataset.source=raw", "dataset.tokenizer=byte"]
    return Cluster(clients, words)


@pytest.fixture
def submit(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Submits; returns the printed lines with single blanks."""

    def run(*words: str, code: int = 0) -> list[str]:
        capsys.readouterr()
        assert main([*cluster.words, "launcher=slurm", *words]) == code
        captured = capsys.readouterr()
        text = captured.err if code else captured.err + captured.out
        return [" ".join(line.split()) for line in text.splitlines()]

    return run


Ended = subprocess.CompletedProcess[str]


@pytest.fixture
def job(cluster: Cluster) -> Callable[..., Ended]:
    """Runs a task of the newest submission, or its last job, from another folder, as SLURM does."""

    def run(task: int | None = None, **variables: str) -> Ended:
        folder = (Path("runs/submissions") / cluster.names()[-1]).absolute()
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        own = {} if task is None else {"SLURM_ARRAY_TASK_ID": str(task)}
        module = "quantexp_launchers.slurm.divided_job"
        return subprocess.run(
            [sys.executable, "-m", module, str(folder)],
            cwd="/",
            env={**inherited, "SLURM_CPUS_ON_NODE": "1", **own, **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    return run
