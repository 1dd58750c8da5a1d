"""Claims on a run folder, which hold where locks do not reach from one machine to another (many NFS mounts).

    .claims/00000003         the third claim: machine, host and process of the claimant
    .claims/00000003.done    it is over

The highest number is the valid claim. The next one is made by a hard link, which a server decides, so only one of
several claimants gets it. Claims are never deleted: one who reads an old list of the folder fails to make a number that
exists.

A claim holds until it is over, or until its claimant is dead. On this machine the folder's lock decides that: who holds
it claims after a dead one. The processes of another machine's claimant touch its claim every `BEAT_S`, and are dead
after `LEASE_S` without that. Both times come from the disk, so no two clocks are compared. A process that was stopped,
or cut off, for `SAFE_S` makes the next claim for its claimant before it writes again; if another claimant has that
number, it writes nothing more (`quantexp.runs.fencing`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import platform
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quantexp.errors import RunInUseError, UnreadableError
from quantexp.reading.files import read_text
from quantexp.reading.json_files import json_of
from quantexp.runs.paths import RunDir

#: Seconds between two touches of a claim.
BEAT_S = 10.0
#: Seconds after which an untouched claim of another machine is void; clients may see times that are a minute old.
LEASE_S = 180.0
#: Seconds within which no other claimant can have seen `LEASE_S`: what it sees is a minute old, in whole seconds.
SAFE_S = LEASE_S - 60.0 - 2 * BEAT_S - 2.0
#: Bytes of a claim.
MOST_BYTES = 1 << 12
_DONE = ".done"
#: Errors of a disk without hard links.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class Machine:
    """What tells a machine, and one start of it, from another."""

    #: The kernel's id of this boot.
    boot: str
    #: The id of the installation; empty in many containers.
    id: str
    host: str

    def is_same(self, other: Machine) -> bool:
        """Whether it is this machine, possibly before its last boot, so that a lock on it would be visible."""
        rebooted = bool(self.id) and (self.id, self.host) == (other.id, other.host)
        return self.boot == other.boot or rebooted


def this_machine() -> Machine:
    """The machine of this process."""
    boot = _text(Path("/proc/sys/kernel/random/boot_id")) or platform.node()
    return Machine(boot, _text(Path("/etc/machine-id")), platform.node())


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


class Disk:
    """The operations on the folder of claims."""

    def __init__(self, run: RunDir) -> None:
        self.folder = run.claims

    def numbers(self) -> list[int]:
        """The numbers of the claims, possibly an old list."""
        try:
            return sorted(int(f.name) for f in self.folder.iterdir() if f.name.isdecimal())
        except FileNotFoundError:
            return []

    def create(self, number: int, text: str) -> bool:
        """Make a claim; false if the number exists."""
        self.folder.mkdir(exist_ok=True)
        whole = self.folder / f".new-{secrets.token_hex(8)}"
        whole.write_text(text)
        try:
            os.link(whole, self.file(number))
        except FileExistsError:
            # A server that repeats a request reports the file that it has just made.
            return self.read(number) == text
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return self._create_in_place(number, text)
        finally:
            whole.unlink(missing_ok=True)
        return True

    def _create_in_place(self, number: int, text: str) -> bool:
        """`create` on a disk without hard links."""
        try:
            with self.file(number).open("x") as stream:
                stream.write(text)
        except FileExistsError:
            return self.read(number) == text
        return True

    def read(self, number: int) -> str:
        """The text of a claim; empty if there is none, or if it is no text.

        Raises:
            OSError: the disk does not answer.
        """
        try:
            return read_text(self.file(number), MOST_BYTES)
        except FileNotFoundError:
            return ""
        except UnreadableError as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from error
            return ""

    def is_done(self, number: int) -> bool:
        """Whether a claim is over."""
        return self.file(number).with_suffix(_DONE).exists()

    def end(self, number: int) -> None:
        """Mark a claim as over."""
        self.file(number).with_suffix(_DONE).touch()

    def touch(self, number: int) -> None:
        """Show that the claimant is alive; the server sets the time."""
        os.utime(self.file(number))

    def age_s(self, number: int) -> float:
        """Seconds since a claim was touched, by the clock of the disk."""
        probe = self.folder / f".now-{platform.node()}-{os.getpid()}"
        probe.write_text("now")
        try:
            return probe.stat().st_mtime - self.file(number).stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def clock(self) -> float:
        """Seconds on this machine, those in which it slept included."""
        return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))

    def file(self, number: int) -> Path:
        """The file of a claim."""
        return self.folder / f"{number:08d}"


class Claim:
    """A claim of this process, or of the one that started it."""

    def __init__(self, disk: Disk, token: str, text: str) -> None:
        """Continue a claim.

        Args:
            disk: the folder of claims.
            token: what tells the claimant from all others.
            text: the text of a further claim.
        """
        self.disk, self.token, self._text = disk, token, text
        #: The time of the last check, by the disk's clock.
        self.checked_at = disk.clock()
        self._lock = threading.Lock()

    def is_valid(self) -> bool:
        """Whether the newest claim is this claimant's; touches it, or makes the next one after a gap.

        Raises:
            OSError: the disk has not answered for so long that another claimant may be valid.
        """
        with self._lock:
            while True:
                began = self.disk.clock()
                try:
                    is_own = self._check(after_gap=began - self.checked_at > SAFE_S)
                except OSError:
                    if self.disk.clock() - self.checked_at > SAFE_S:
                        raise
                    return True
                if not is_own:
                    return False
                if (
                    self.disk.clock() - began <= BEAT_S
                ):  # else this process was stopped during the check
                    self.checked_at = began
                    return True

    def _check(self, *, after_gap: bool) -> bool:
        newest = max(self.disk.numbers(), default=0)
        while self._is_own(newest):
            if not after_gap:
                self.disk.touch(newest)
                return True
            if self.disk.create(newest + 1, self._text):
                return True
            newest += 1  # perhaps another process of this claimant made it
        return False

    def _is_own(self, number: int) -> bool:
        return _token(self.disk.read(number)) == self.token

    @contextlib.contextmanager
    def touching(self) -> Iterator[None]:
        """Touch the claim until the end of this context, and mark it as over there."""
        over = threading.Event()

        def touch() -> None:
            while not over.wait(BEAT_S):
                with contextlib.suppress(OSError):  # the disk may be back at the next time
                    if not self.is_valid():
                        return

        threading.Thread(target=touch, name="claim", daemon=True).start()
        try:
            yield
        finally:
            over.set()
            # The folder may have been deleted; else the claim ends with its lease.
            with contextlib.suppress(OSError):
                self.end()

    def end(self) -> None:
        """Mark the claim as over if it is still valid."""
        newest = max(self.disk.numbers(), default=0)
        if self._is_own(newest):
            self.disk.end(newest)


def take_claim(run: RunDir, machine: Machine | None = None, disk: Disk | None = None) -> Claim:
    """Claim a run folder; the caller holds its lock.

    Raises:
        RunInUseError: a process on another machine has a valid claim, or was faster.
        OSError: the folder cannot be written.
    """
    machine, disk = machine or this_machine(), disk or Disk(run)
    newest = max(disk.numbers(), default=0)
    if (holder := _holder(newest, machine, disk)) is not None:
        raise RunInUseError(
            f"{run.root} is in use by {holder}; wait for it, or stop it there. If that machine is off, wait "
            f"{LEASE_S / 60:.0f} minutes"
        )
    token = secrets.token_hex(8)
    text = _text_of(machine, token)
    if not disk.create(newest + 1, text):
        raise RunInUseError(f"{run.root} was just taken by another process; wait for it")
    return Claim(disk, token, text)


def inherited_claim(run: RunDir, token: str) -> Claim:
    """The claim of the process that started this one, of which this one does not know when it was checked."""
    claim = Claim(Disk(run), token, _text_of(this_machine(), token))
    claim.checked_at = -math.inf
    return claim


def _text_of(machine: Machine, token: str) -> str:
    return json.dumps({**vars(machine), "pid": os.getpid(), "token": token})


def _token(text: str) -> str | None:
    """The claimant's token; None if the text is no claim."""
    try:
        return str(json_of(text)["token"])
    except (ValueError, KeyError, TypeError):
        return None


def is_claimed(run: RunDir) -> bool:
    """Whether a process on another machine has a valid claim."""
    disk = Disk(run)
    with contextlib.suppress(OSError):
        return _holder(max(disk.numbers(), default=0), this_machine(), disk) is not None
    return False


def _holder(number: int, machine: Machine, disk: Disk) -> str | None:
    """The holder of a valid claim on another machine; None if there is none."""
    if number == 0 or disk.is_done(number):
        return None
    try:
        content = json_of(disk.read(number))
        holder = Machine(str(content["boot"]), str(content["id"]), str(content["host"]))
        who = f"process {content['pid']} on {holder.host}"
    except (OSError, ValueError, KeyError, TypeError):
        holder, who = Machine("", "", ""), "a process on another machine"
    if holder.is_same(machine):
        return None  # its lock would be held
    return who if disk.age_s(number) < LEASE_S else None
