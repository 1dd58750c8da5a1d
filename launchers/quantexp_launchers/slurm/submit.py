"""Submits points to SLURM: checks and prepares everything first, then submits one array for each request, or several
where the cluster allows fewer tasks in one (MaxArraySize).

It does not wait for the jobs. The submitter holds the lock of every folder during the submission, so several submitters
of the same sweep submit each run once. It writes the submission's name into the folders before it calls sbatch, so
that no job is lost if the submitter is killed. If SLURM refuses one of several arrays, none is submitted: the accepted
arrays are cancelled, and their jobs, which cannot start before the folders are unlocked, would exit without running.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from quantexp.config.load import plain
from quantexp.errors import ConfigError, RunError
from quantexp.launch.attempt import Opened, open_run, run_folder
from quantexp.launch.recorded import root_of, with_absolute_paths
from quantexp.runs.device import device_class
from quantexp.runs.paths import RunDir, RunsRoot, Submission
from quantexp.runs.provenance import command_line
from quantexp.runs.snapshot import snapshot_name
from quantexp.runs.status import State, now, read_status, write_json, write_status
from quantexp.runs.sweep_list import sweep_file, write_sweep
from quantexp.schema import Experiment, LauncherConfig
from quantexp_launchers.slurm.batch import (
    Array,
    Batch,
    Ready,
    Sent,
    assign_lanes,
    batches,
    dependency,
)
from quantexp_launchers.slurm.check import check_script
from quantexp_launchers.slurm.clients import ClientError, run_client
from quantexp_launchers.slurm.scheduler import max_array_size, require_slurm, submit_script
from quantexp_launchers.slurm.script import run_script
from quantexp_launchers.slurm.states import base_id, ids_of_tasks
from quantexp_launchers.slurm.submitted import print_submitted

#: Seconds to wait for other submitters of the same runs.
PATIENCE_S = 300.0
#: Characters that paths.root must not contain: SLURM replaces % in file names and treats \ as their end.
_NOT_IN_ROOT = "%\\"


def submit_run(experiment: Experiment, console: Console) -> int:
    """Submit one run and print the next commands; returns 0."""
    with private([experiment]):
        sent, arrays = send([(experiment, 0)], console)
    print_submitted(sent, arrays, console, sent[0].run.root)
    return 0


def submit_sweep(points: list[tuple[Experiment, int]], console: Console) -> int:
    """Submit a sweep, write its list to runs/sweeps/ and print the next commands; returns 0."""
    root, started = root_of(points[0][0]), now()
    with private([experiment for experiment, _ in points]):
        sent, arrays = send(points, console, lambda sent: _list(root, started, points, sent))
        file = _list(root, started, points, sent)
    print_submitted(sent, arrays, console, file)
    return 0


def _list(
    root: Path, started: str, points: list[tuple[Experiment, int]], sent: Sequence[Sent]
) -> Path:
    """Write the sweep's list of runs; called first before the submission, so that every submitted run is listed."""
    rows = [
        {
            "run": point.run.root.name,
            "job_id": point.job_id,
            "reason": point.reason,
            "stage": stage,
            "config": plain(with_absolute_paths(point.experiment)),
        }
        for point, (_, stage) in zip(sent, points, strict=True)
    ]
    file = sweep_file(root, started)
    write_sweep(file, {"started": started, "runs": rows})
    return file


@contextlib.contextmanager
def private(experiments: Sequence[Experiment]) -> Iterator[None]:
    """Make new files private inside this context if a configuration holds environment variables."""
    if not any(experiment.launcher.environment for experiment in experiments):
        yield
        return
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def send(
    points: list[tuple[Experiment, int]],
    console: Console,
    prepared: Callable[[list[Sent]], object] = lambda _: None,
) -> tuple[list[Sent], list[Array]]:
    """Submit every point that needs to run; points of a later stage wait until all of an earlier stage completed.

    Args:
        points: experiments, each with its stage.
        console: for messages about a run's earlier attempt.
        prepared: called when every folder is ready, before the submission.

    Raises:
        ConfigError: the points have different paths.root, or an invalid one.
        RunError: SLURM is not installed, or refuses a request; nothing was submitted.
        DataError: data is missing.
        CaptureError: the capture of one exceeds its budget or the free disk space.
    """
    require_slurm()
    root = _common_root([experiment for experiment, _ in points])
    check_root(root, [experiment.launcher for experiment, _ in points])
    most = max_array_size()
    wanted = [Ready(e, stage, root, root) for e, stage in points]
    for batch in batches(root, "quantexp", wanted, most):
        if (notice := check_batch(batch)) is not None:
            console.print(notice, soft_wrap=True, markup=False)
    with contextlib.ExitStack() as locks:
        folders = _open_runs(points, locks)
        for folder in folders:
            if folder.notice is not None:
                console.print(folder.notice, soft_wrap=True, markup=False)
        prepared(_sent(points, folders, []))
        arrays = _send(root, points, folders, most)
    return _sent(points, folders, arrays), arrays


def _sent(
    points: list[tuple[Experiment, int]], folders: list[Opened], arrays: list[Array]
) -> list[Sent]:
    ids = {
        run: job_id
        for array in arrays
        for run, job_id in zip(array.batch.runs, array.job_ids, strict=True)
    }
    return [
        Sent(
            experiment,
            folder.run,
            ids.get(folder.run.root),
            folder.skipped or folder.elsewhere or "",
        )
        for (experiment, _), folder in zip(points, folders, strict=True)
    ]


def check_batch(batch: Batch) -> str | None:
    """`check_script` of a batch."""
    return check_script(run_script(batch), batch.launcher)


def submit_batch(batch: Batch) -> list[str]:
    """Submit the batch and return the job id of each run: 123_0, 123_1, ..., or 123 for a single run.

    Raises:
        RunError: as `submit_script`.
    """
    job_id = submit_script(run_script(batch), Submission(batch.folder).script, batch.launcher)
    return ids_of_tasks(job_id, batch.num_tasks)


def submit_chain(batch: Batch, first: str) -> tuple[str, ...]:
    """Submit the jobs that go on with a batch's runs, each after the end of the one before; their ids.

    Raises:
        RunError: as `submit_script`.
    """
    ids = [first]
    for _ in range(batch.launcher.chain):
        link = dataclasses.replace(batch, dependency=f"afterany:{ids[-1]}")
        file = Submission(batch.folder).script.with_name(f"submission-{len(ids)}.sh")
        ids.append(submit_script(run_script(link), file, batch.launcher))
    if batch.launcher.chain:
        write_json(Submission(batch.folder).chain, ids)
    return tuple(ids[1:])


def planned(experiment: Experiment, run: Path) -> Batch:
    """The batch of one run as it would be submitted, with placeholders for the time and id in its name.

    Raises:
        ConfigError: paths.root has a character that SLURM does not support.
    """
    root = root_of(experiment)
    check_root(root, [experiment.launcher])
    snapshot = RunsRoot(root).snapshots / snapshot_name()
    (batch,) = batches(root, "quantexp-TIME-ID", [Ready(experiment, 0, run, snapshot)])
    return batch


def check_root(root: Path, launchers: Sequence[LauncherConfig]) -> None:
    """Refuse a folder of runs whose path a job's script cannot contain.

    Raises:
        ConfigError: names the character.
    """
    bad = [c for c in str(root) if c in _NOT_IN_ROOT or not c.isprintable()]
    if any(launcher.container is not None for launcher in launchers):
        bad += [c for c in str(root) if c == ","]
    if bad:
        raise ConfigError(
            f"paths.root must not hold {bad[0]!r} under SLURM, got {str(root)!r}; choose another folder"
        )


def _common_root(experiments: list[Experiment]) -> Path:
    roots = sorted({root_of(experiment) for experiment in experiments})
    if len(roots) != 1:
        raise ConfigError(
            f"paths.root must be one folder for all runs that are submitted together, got {', '.join(map(str, roots))}"
        )
    return roots[0]


def _open_runs(points: list[tuple[Experiment, int]], locks: contextlib.ExitStack) -> list[Opened]:
    """Open and lock the folder of every point, sorted by name so that two submitters cannot deadlock."""
    names = [run_folder(e, device_class(e.launcher)).root.name for e, _ in points]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"several points are the same run ({', '.join(twice)}): they differ in nothing that changes its numbers; "
            "leave out all but one of each"
        )
    folders: dict[int, Opened] = {}
    for index in sorted(range(len(points)), key=names.__getitem__):
        experiment = points[index][0]
        device = device_class(experiment.launcher)
        opening = open_run(experiment, device, command_line(), patience_s=PATIENCE_S)
        folders[index], _ = locks.enter_context(opening)
    return [folders[index] for index in range(len(points))]


def _send(
    root: Path, points: list[tuple[Experiment, int]], folders: list[Opened], most: int
) -> list[Array]:
    ready, waiting = [], []
    for (experiment, stage), folder in zip(points, folders, strict=True):
        if folder.elsewhere is not None:
            waiting.append((stage, folder.run))
        elif folder.skipped is None:
            ready.append(Ready(experiment, stage, folder.run.root, folder.snapshot))
    name = f"quantexp-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    to_send = assign_lanes(batches(root, name, ready, most))
    arrays: list[Array] = []
    try:
        for batch in to_send:
            elsewhere = [_job_id(run) for stage, run in waiting if stage < batch.stage]
            after = dependency(batch, arrays, filter(None, elsewhere))
            batch = dataclasses.replace(batch, dependency=after, umask=current_umask())
            _announce(batch)
            ids = tuple(submit_batch(batch))
            arrays.append(Array(batch, ids, submit_chain(batch, base_id(ids[0]))))
    except BaseException as error:
        _withdraw(to_send, str(error) or type(error).__name__)
        raise
    for array in arrays:
        _note(array)
    return arrays


def _job_id(run: RunDir) -> str | None:
    status = read_status(run.status)
    return None if status is None else status.job_id


def current_umask() -> int:
    """This process's umask."""
    current = os.umask(0o077)
    os.umask(current)
    return current


def _announce(batch: Batch) -> None:
    """Write the submission's folder and its name into every run, before sbatch is called."""
    try:
        batch.folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        batch.folder.mkdir(mode=0o700)
        tasks = Submission(batch.folder).tasks
        write_json(
            tasks,
            {
                "runs": [str(run) for run in batch.runs],
                "snapshot": str(batch.snapshot),
                "umask": batch.umask,
            },
        )
        tasks.chmod(0o600)
    except OSError as error:
        raise RunError(
            f"{batch.folder} cannot be written: {error.strerror}; set paths.root to a folder that can"
        ) from error
    for task, run in enumerate(batch.runs):
        status = read_status(RunDir(run).status)
        assert status is not None
        status.submission, status.task, status.folder = batch.name, task, str(run)
        write_status(RunDir(run).status, status)


def _withdraw(batches: Sequence[Batch], why: str) -> None:
    """Cancel the batches, which SLURM may have accepted without answering, and mark their runs as cancelled."""
    for batch in batches:
        if batch.folder.is_dir():
            with contextlib.suppress(ClientError):
                run_client(["scancel", "--quiet", f"--name={batch.name}"])
    for run in (RunDir(run) for batch in batches for run in batch.runs):
        with contextlib.suppress(RunError, OSError):  # `why` is the error to report
            status = read_status(run.status)
            assert status is not None
            status.submission = status.task = status.folder = None
            status.state, status.reason = State.CANCELLED, f"not submitted: {why}"
            write_status(run.status, status)


def _note(array: Array) -> None:
    """Write the job ids into the runs; a job that has already started waits for the folder's lock."""
    for run, job_id in zip(array.batch.runs, array.job_ids, strict=True):
        status = read_status(RunDir(run).status)
        assert status is not None
        status.job_id = job_id
        write_status(RunDir(run).status, status)
