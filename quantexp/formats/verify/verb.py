"""`quantexp verify`: runs the suite, and stores a certificate for each device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quantexp.errors import VerifyError
from quantexp.formats import get_format
from quantexp.formats.verify import kernels
from quantexp.formats.verify.certificate import Certificate, certify, save
from quantexp.formats.verify.gold_check import GOLD
from quantexp.formats.verify.oracles import find_oracles
from quantexp.formats.verify.suite import SUBJECTS, TRANSFORM, devices, place, verify
from quantexp.formats.verify.tally import Row, Tally

#: Reports the current subject.
Tell = Callable[[str, Tally], None]


@dataclass(frozen=True)
class Outcome:
    """The results, and where they are stored."""

    rows: list[Row]
    subjects: list[str]
    #: Name -> version, and name -> reason for absence.
    oracles: dict[str, str]
    absent: dict[str, str]
    seconds: float
    #: One per device; empty if only a part of the formats was verified and passed.
    certificates: list[Path]

    @property
    def cases(self) -> int:
        """Values compared."""
        return sum(row.cases for row in self.rows)

    @property
    def mismatches(self) -> int:
        """Values that differed."""
        return sum(row.mismatches for row in self.rows)


def chosen_subjects(names: str | None) -> list[str]:
    """The subjects of `--formats a,b`; all without it.

    Raises:
        VerifyError: an unknown name.
    """
    if names is None:
        return list(SUBJECTS)
    chosen = set()
    for name in names.split(","):
        try:
            chosen.add(name if name == TRANSFORM else get_format(name).name)
        except ValueError as error:
            raise VerifyError(f"--formats: {error}, or {TRANSFORM}") from error
    return [subject for subject in SUBJECTS if subject in chosen]


def chosen_devices(name: str | None) -> tuple[str, ...]:
    """The devices of `--device`; all available ones without it.

    Raises:
        VerifyError: there is no CUDA device.
    """
    if name is not None and name not in devices():
        raise VerifyError("this machine has no CUDA device: leave --device out, or give cpu")
    return devices() if name is None else (name,)


def run_verify(names: str | None, device: str | None, cache: Path, console: Console) -> Outcome:
    """Verify, with a live line on a terminal, and store a certificate for each device.

    Verifying a part of the formats stores no certificate unless a value differed.

    Raises:
        VerifyError: an unknown format or device, or a certificate that cannot be written.
    """
    subjects, on = chosen_subjects(names), chosen_devices(device)
    placed = place(on, kernels.KERNELS)
    oracles, absent = find_oracles()
    versions = {oracle.name: oracle.version for oracle in oracles}
    start = time.monotonic()
    with _live_line(subjects, console) as tell:
        rows = verify(subjects, placed, oracles, tell).rows
    seconds = time.monotonic() - start
    files = []
    for device_type in on:
        labels = [p.label for p in placed if p.device == device_type]
        about = [asdict(row) for row in rows if row.kernel in (*labels, GOLD)]
        certificate: Certificate = certify(
            device_type, about, labels, subjects, versions, absent, seconds
        )
        if subjects == list(SUBJECTS) or not certificate.passed:
            files.append(save(certificate, cache))
    return Outcome(rows, subjects, versions, absent, seconds, files)


@contextmanager
def _live_line(subjects: list[str], console: Console) -> Iterator[Tell]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as line:
        task = line.add_task("verify", total=len(subjects), numbers="")

        def tell(subject: str, tally: Tally) -> None:
            cases = sum(row.cases for row in tally.rows)
            numbers = f"{cases:,} values, {tally.mismatches:,} differ"
            done = subjects.index(subject)
            line.update(task, description=subject, completed=done, numbers=numbers)

        yield tell
