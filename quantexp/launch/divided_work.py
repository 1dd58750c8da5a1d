"""Work beside training that jobs of a cluster do: the record of its submission, and its live jobs.

`prepare` divides its work into parts; `draw` and `requantise` are one job each, which runs the command itself. The
launcher submits both (`Launcher.divide`).

`RESULT.partial/submission.json` names the launcher, so that whoever does the same work next, on a cluster or on this
machine, asks the launcher whether jobs still do. It stays when jobs are killed, and is removed with the folder when the
result is complete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from quantexp.errors import CaptureError, RunError, UnreadableError
from quantexp.launch.backend import DividedWork, Job, launcher_of
from quantexp.reading.json_files import read_json
from quantexp.runs.status import write_json
from quantexp.runs.work_folder import WorkFolder


@dataclass(frozen=True)
class Submitted:
    """The newest submission."""

    #: The kind of the launcher.
    launcher: str
    #: The name of all its jobs.
    name: str
    #: The folder of its script and of the output of its jobs.
    folder: str
    #: The hash of the work.
    job: str


def one_job(
    words: Sequence[str], result: Path, *, activity: str, elsewhere: str, again: str
) -> DividedWork:
    """A command of the command line that reads captures, as the work of one job.

    Args:
        words: the verb and its arguments.
        result: the output folder.
        activity: as in `another process draws there`.
        elsewhere: what names another output folder: `--out`.
        again: what a repeated command does.
    """
    digest = hashlib.sha256(json.dumps([*words, str(result)]).encode()).hexdigest()[:16]
    root = result.with_name(f"{result.name}.partial")
    folder = WorkFolder(root, digest, activity, elsewhere, CaptureError)
    command = ["-m", "quantexp.cli.jobs", str(root), *words]
    return DividedWork(words[0], result, folder, command, again)


def read_submitted(folder: WorkFolder) -> Submitted | None:
    """The newest submission; None if there is none.

    Raises:
        RunError: the file is damaged.
    """
    try:
        return read_json(folder.submission, Submitted)
    except FileNotFoundError:
        return None
    except UnreadableError as error:
        raise RunError(f"{error}; delete it if no job {folder.activity} there") from error


def write_submitted(folder: WorkFolder, submitted: Submitted) -> None:
    """Record a submission.

    Raises:
        QuantexpError: the file cannot be written.
    """
    with folder.writing():
        write_json(folder.submission, asdict(submitted))


def live_jobs(submitted: Submitted) -> list[Job]:
    """The jobs of a submission that wait or run.

    Raises:
        RunError: the scheduler does not answer.
        ConfigError: its launcher is not installed here.
    """
    return launcher_of(submitted.launcher).jobs_named(submitted.name)


def refuse_while_jobs_work(folder: WorkFolder) -> None:
    """Refuse to work where jobs of a cluster do.

    Raises:
        RunError: names the first job, or says why it is not known whether there are any.
    """
    if (submitted := read_submitted(folder)) is None:
        return
    try:
        jobs = live_jobs(submitted)
    except RunError as error:
        raise RunError(
            f"{folder.submission} names jobs of launcher.kind={submitted.launcher}, which cannot be queried ({error}); "
            "delete that file if none of them is left"
        ) from error
    if jobs:
        raise RunError(
            f"{folder.root}: job {jobs[0].id} is {jobs[0].activity} and {folder.activity} there; wait for it, cancel "
            f"it (submission {submitted.name}), or give another {folder.elsewhere}"
        )
