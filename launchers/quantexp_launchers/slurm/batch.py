"""Which runs go to SLURM together: one array for each stage and distinct request, within a limit on all of them.

Runs of a later stage start after all of an earlier one completed, whoever submitted those. A limit on runs at the same
time (`launcher.max_parallel`) holds for all arrays together: with fewer arrays than the limit each has a share of it;
else they form lanes, in which one array waits for the others.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantexp.launch.ledger.job import base_id
from quantexp.runs.paths import RunDir, RunsRoot
from quantexp.schema import Experiment, LauncherConfig


@dataclass(frozen=True)
class Batch:
    """Runs that ask for the same resources: one array."""

    #: The submission's folder, and SLURM's name for its jobs.
    folder: Path
    name: str
    runs: tuple[Path, ...]
    launcher: LauncherConfig
    #: The source that the jobs import.
    snapshot: Path
    #: Who may read what the jobs write into the run folders: the submitter's file mode mask.
    umask: int = 0o022
    #: Runs at the same time; None leaves it to the cluster.
    throttle: int | None = None
    #: sbatch's --dependency.
    dependency: str | None = None
    #: Batches of a later stage start after all runs of an earlier one completed.
    stage: int = 0
    #: Batches of one lane run one after the other where a limit on runs at the same time takes that.
    lane: int = 0


@dataclass(frozen=True)
class Sent:
    """What became of one point."""

    experiment: Experiment
    run: RunDir
    #: SLURM's id of the job; None where none was needed.
    job_id: str | None = None
    #: Why it was not sent: completed already, or waiting already.
    reason: str = ""


@dataclass(frozen=True)
class Array:
    """One array that was sent."""

    batch: Batch
    job_ids: tuple[str, ...]

    @property
    def id(self) -> str:
        """What SLURM calls it: 123."""
        return base_id(self.job_ids[0])


@dataclass(frozen=True)
class Ready:
    """A run that is to be sent."""

    experiment: Experiment
    stage: int
    run: Path


def batches(root: Path, name: str, ready: Iterable[Ready], snapshot: Path) -> list[Batch]:
    """One batch for each stage and distinct request, in the order of the points, earlier stages first."""
    groups: dict[tuple[int, str], list[Ready]] = {}
    for each in ready:
        request = json.dumps(
            dataclasses.asdict(each.experiment.launcher), default=str, sort_keys=True
        )
        groups.setdefault((each.stage, request), []).append(each)
    ordered = sorted(groups.values(), key=lambda group: group[0].stage)
    names = [name] if len(ordered) == 1 else [f"{name}-{n}" for n in range(len(ordered))]
    return [
        Batch(
            RunsRoot(root).submissions / own,
            own,
            tuple(each.run for each in group),
            group[0].experiment.launcher,
            snapshot,
            stage=group[0].stage,
        )
        for own, group in zip(names, ordered, strict=True)
    ]


def in_lanes(among: list[Batch]) -> list[Batch]:
    """Batches with their shares of the least `launcher.max_parallel` of any, which holds for all of them together."""
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
    """How many runs each lane may have at once: as even as can be, but no more than its largest array has."""
    shares = [1] * len(widest)
    for _ in range(limit - len(widest)):
        room = [lane for lane, width in enumerate(widest) if shares[lane] < width]
        if room:
            shares[min(room, key=shares.__getitem__)] += 1
    return shares


def dependency(batch: Batch, sent: Sequence[Array], elsewhere: Iterable[str] = ()) -> str | None:
    """What a batch waits for, as sbatch takes it.

    Args:
        batch: is to be sent.
        sent: what was sent before it.
        elsewhere: jobs of others that run what belongs to an earlier stage.
    """
    earlier = [array for array in sent if array.batch.stage < batch.stage]
    ok = [*(array.id for array in earlier), *elsewhere]
    lane = [array for array in sent if array.batch.lane == batch.lane and array not in earlier]
    any_end = [array.id for array in lane] if batch.throttle is not None else []
    words = [
        ":".join([kind, *ids]) for kind, ids in (("afterok", ok), ("afterany", any_end)) if ids
    ]
    return ",".join(words) or None
