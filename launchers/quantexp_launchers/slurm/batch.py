"""Groups runs into SLURM arrays: one array for each stage and distinct resource request, or several where one would
have more tasks than the cluster allows.

Runs of a later stage start after all runs of an earlier stage completed, whoever submitted those. The limit on parallel
runs (`launcher.max_parallel`) holds for all arrays together: if there are fewer arrays than the limit, each has a share
of it; otherwise the arrays form lanes, in which one array waits for the previous one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantexp.runs.paths import RunDir, RunsRoot
from quantexp.schema import Experiment, LauncherConfig
from quantexp_launchers.slurm.scheduler import MAX_ARRAY
from quantexp_launchers.slurm.states import base_id


@dataclass(frozen=True)
class Batch:
    """Runs with the same resource request: one array."""

    #: The submission's folder, and SLURM's job name.
    folder: Path
    name: str
    runs: tuple[Path, ...]
    launcher: LauncherConfig
    #: The source snapshot that the jobs import.
    snapshot: Path
    #: The submitter's umask, which the jobs apply to the run folders.
    umask: int = 0o022
    #: Maximum parallel runs; None leaves the limit to the cluster.
    throttle: int | None = None
    #: sbatch's --dependency.
    dependency: str | None = None
    #: Batches of a later stage start after all runs of an earlier stage completed.
    stage: int = 0
    #: Batches of one lane run one after the other if `launcher.max_parallel` requires it.
    lane: int = 0

    @property
    def num_tasks(self) -> int:
        """The tasks of the array: one for each run."""
        return len(self.runs)


@dataclass(frozen=True)
class Sent:
    """The result of submitting one point."""

    experiment: Experiment
    run: RunDir
    #: The job id; None if no job was needed.
    job_id: str | None = None
    #: Why no job was submitted: the run is already completed or pending.
    reason: str = ""


@dataclass(frozen=True)
class Array:
    """One submitted array."""

    batch: Batch
    job_ids: tuple[str, ...]
    #: The ids of the arrays that go on with its runs, one after another.
    chained: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The array's job id: 123."""
        return base_id(self.job_ids[0])

    @property
    def last_id(self) -> str:
        """The id of the array after which all runs have ended."""
        return self.chained[-1] if self.chained else self.id


@dataclass(frozen=True)
class Ready:
    """A run to submit."""

    experiment: Experiment
    stage: int
    run: Path
    #: The source snapshot that it runs; that of a run that goes on may be older.
    snapshot: Path


def batches(root: Path, name: str, ready: Iterable[Ready], most: int = MAX_ARRAY) -> list[Batch]:
    """One batch for each stage, distinct request and snapshot, in the order of the points, earlier stages first.

    A batch has at most `most` runs; further runs of the same kind are in further batches.
    """
    groups: dict[tuple[int, str, Path], list[Ready]] = {}
    for run in ready:
        request = json.dumps(
            dataclasses.asdict(run.experiment.launcher), default=str, sort_keys=True
        )
        groups.setdefault((run.stage, request, run.snapshot), []).append(run)
    ordered = [
        group[first : first + most]
        for group in sorted(groups.values(), key=lambda group: group[0].stage)
        for first in range(0, len(group), most)
    ]
    names = [name] if len(ordered) == 1 else [f"{name}-{n}" for n in range(len(ordered))]
    return [
        Batch(
            RunsRoot(root).submissions / batch_name,
            batch_name,
            tuple(run.run for run in group),
            group[0].experiment.launcher,
            group[0].snapshot,
            stage=group[0].stage,
        )
        for batch_name, group in zip(names, ordered, strict=True)
    ]


def assign_lanes(among: list[Batch]) -> list[Batch]:
    """The batches with lanes and throttles, so that all together respect the smallest `launcher.max_parallel`."""
    limits = [b.launcher.max_parallel for b in among if b.launcher.max_parallel is not None]
    if not limits:
        return among
    limit, lanes = min(limits), min(min(limits), len(among))
    sizes, widest = [0] * lanes, [0] * lanes
    placed: list[int] = []
    for batch in among:
        lane = sizes.index(min(sizes))
        sizes[lane] += len(batch.runs)
        widest[lane] = max(widest[lane], len(batch.runs))
        placed.append(lane)
    shares = _shares(limit, widest)
    return [
        dataclasses.replace(batch, throttle=shares[lane], lane=lane)
        for batch, lane in zip(among, placed, strict=True)
    ]


def _shares(limit: int, widest: list[int]) -> list[int]:
    """The parallel runs of each lane: as even as possible, but at most the runs of the lane's largest array."""
    shares = [1] * len(widest)
    for _ in range(limit - len(widest)):
        room = [lane for lane, width in enumerate(widest) if shares[lane] < width]
        if room:
            shares[min(room, key=shares.__getitem__)] += 1
    return shares


def dependency(batch: Batch, sent: Sequence[Array], elsewhere: Iterable[str] = ()) -> str | None:
    """The value of sbatch's --dependency for a batch; None if it waits for nothing.

    Args:
        batch: the batch to submit.
        sent: the arrays submitted before it.
        elsewhere: job ids of other submissions that execute runs of an earlier stage.
    """
    earlier = [array for array in sent if array.batch.stage < batch.stage]
    ok = [*(array.last_id for array in earlier), *elsewhere]
    lane = [array for array in sent if array.batch.lane == batch.lane and array not in earlier]
    any_end = [array.last_id for array in lane] if batch.throttle is not None else []
    words = [
        ":".join([kind, *ids]) for kind, ids in (("afterok", ok), ("afterany", any_end)) if ids
    ]
    return ",".join(words) or None
