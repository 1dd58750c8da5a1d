"""The submission of divided work to a cluster: what `RESULT.partial/submission.json` records, and its live jobs.

The file names the launcher, so that whoever does the same work next, on a cluster or on this machine, asks the launcher
whether jobs still do. It stays when jobs fail, and is removed with the folder when the result is complete.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from quantexp.errors import RunError, UnreadableError
from quantexp.launch.backend import Job, launcher_of
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
