"""Who may write into a run folder: the claimant's newest start alone.

The scheduler may requeue a job while its earlier start still runs, because it cannot end processes on a node that it
has lost. Each start therefore writes its name into the folder. A process that reads the name of another start there
exits without writing anything. This works even on disks whose locks do not reach from node to node. Outside of a
scheduler the start has the name of its claim.

`.claim` names the host, process and job that start or execute a run; it holds where locks do not reach from one machine
to another (many NFS mounts). The process that has the folder's lock creates it exclusively, which a file server
decides, and deletes it at the end. The claim of a killed process stays. On its own machine the free lock tells that the
process is dead, so the next one replaces the claim. Another machine cannot tell, and refuses the run until the claim is
deleted. If a claim is deleted while its process lives, and another one starts, the process writes nothing more.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from quantexp.errors import RunInUseError, UnreadableError
from quantexp.reading.json_files import read_json
from quantexp.runs.disk import write_whole
from quantexp.runs.lock import cannot_write
from quantexp.runs.paths import RunDir

#: The variable in which a launcher names each of its starts, such as the job's id and its restart count.
START = "QUANTEXP_START"


class TakenOverError(BaseException):
    """This process belongs to a start that is no longer the newest; a BaseException, so that no handler catches it."""


def own_start() -> str:
    """The name of this process's start; empty if its launcher gives it none."""
    return os.environ.get(START, "")


def take_over(run: RunDir, start: str | None = None) -> None:
    """Make a start the only one that may write; None stands for this process's."""
    write_whole(run.start, own_start() if start is None else start)


def is_newest(run: RunDir, start: str) -> bool:
    """Whether no other start has taken over the run; false also if its folder is gone."""
    try:
        return run.start.read_text() == start
    except OSError:
        return False


def is_ours(run: RunDir) -> bool:
    """Whether this process may write; any may that has no start."""
    return not own_start() or is_newest(run, own_start())


def require_ours(run: RunDir) -> None:
    """Stop this process if another start has taken over the run.

    Raises:
        TakenOverError: another start may write, this one may not.
    """
    if not is_ours(run):
        raise TakenOverError


#: Bytes of a claim.
MOST_BYTES = 1 << 12


@dataclass(frozen=True)
class Claim:
    """The content of `.claim`."""

    #: What tells this claim from all others.
    name: str = ""
    host: str = ""
    pid: int = 0
    #: SLURM's job in which the process runs; empty outside of one.
    job: str = ""
    #: The kernel's id of this boot, and the id of the installation, which is empty in many containers.
    boot: str = ""
    machine: str = ""

    def is_of(self, other: Claim) -> bool:
        """Whether both are of one machine, possibly before its last boot, where the other one's lock is visible."""
        rebooted = bool(self.machine) and (self.machine, self.host) == (other.machine, other.host)
        return self.boot == other.boot or rebooted

    def __str__(self) -> str:
        if not self.name:
            return "a process on another machine"
        return f"process {self.pid} on {self.host}" + f" (SLURM job {self.job})" * bool(self.job)


def own_claim() -> Claim:
    """A new claim of this process."""
    return Claim(
        secrets.token_hex(8),
        platform.node(),
        os.getpid(),
        os.environ.get("SLURM_JOB_ID", ""),
        _text(Path("/proc/sys/kernel/random/boot_id")) or platform.node(),
        _text(Path("/etc/machine-id")),
    )


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


@contextlib.contextmanager
def claimed(run: RunDir) -> Iterator[str]:
    """Claim a run folder, of which the caller has the lock, until the end of the context; yields the claim's name.

    Raises:
        RunInUseError: a process on another machine has the claim, or took it at the same moment.
        RunError: the folder cannot be written.
    """
    own = own_claim()
    try:
        try:
            _create(run, own)
            take_over(run, own.name)
        except OSError as error:
            raise cannot_write(run, error) from error
        yield own.name
    finally:
        drop_claim(run, own.name)


def _create(run: RunDir, own: Claim) -> None:
    text = json.dumps(asdict(own))
    try:
        created = run.claim.open("x")
    except FileExistsError:
        if (holder := claimant(run)) is not None:
            raise RunInUseError(
                f"{run.root} is in use by {holder}; wait for it, or stop it there. If that process is gone, "
                f"delete {run.claim}"
            ) from None
        write_whole(run.claim, text)
        return
    try:
        with created:
            created.write(text)
    except (
        OSError
    ):  # the disk is full; a file that could not be created may be another's claim, and stays
        run.claim.unlink(missing_ok=True)
        raise


def drop_claim(run: RunDir, name: str) -> None:
    """Delete a claim if it still has this name."""
    with contextlib.suppress(OSError):  # the folder may have been deleted
        if name and (claim := read_claim(run)) is not None and claim.name == name:
            run.claim.unlink()


def drop_dead_claim(run: RunDir) -> None:
    """Delete the claim that a killed process of this machine left; the caller has the folder's lock."""
    if (claim := read_claim(run)) is not None and claim.is_of(own_claim()):
        drop_claim(run, claim.name)


def claimant(run: RunDir) -> Claim | None:
    """The claim of a process on another machine; None if there is none."""
    claim = read_claim(run)
    return None if claim is None or claim.is_of(own_claim()) else claim


def read_claim(run: RunDir) -> Claim | None:
    """The claim on a run; None without one, and one without a name if it cannot be read."""
    try:
        return read_json(run.claim, Claim, MOST_BYTES)
    except FileNotFoundError:
        return None
    except UnreadableError:
        return Claim()
