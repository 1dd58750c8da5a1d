"""`quantexp verify`: runs the suite, and stores a certificate for each device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quantexp.errors import UnreadableError, VerifyError
from quantexp.extras.verify import kernels
from quantexp.extras.verify.gold_check import GOLD
from quantexp.extras.verify.oracles import find_oracles
from quantexp.extras.verify.suite import SUBJECTS, TRANSFORM, devices, place, verify
from quantexp.extras.verify.tally import Row, Tally
from quantexp.formats import Format, get_format
from quantexp.formats.certificate import Certificate, certify, save
from quantexp.formats.definitions.files import read_format, shipped_formats

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


def chosen_subjects(names: str | None, files: Sequence[Path] = ()) -> list[str]:
    """The subjects of `--formats a,b` and of files; all without either.

    Raises:
        VerifyError: an unknown name.
    """
    if names is None:
        return [file.stem for file in files] or [*SUBJECTS, *shipped_formats()]
    chosen = {file.stem for file in files}
    for name in names.split(","):
        try:
            chosen.add(name if name == TRANSFORM else get_format(name).name)
        except ValueError as error:
            raise VerifyError(f"--formats: {error}, or {TRANSFORM}") from error
    every = [*SUBJECTS, *shipped_formats(), *(file.stem for file in files)]
    return [subject for subject in dict.fromkeys(every) if subject in chosen]


def declared_in(files: Sequence[Path]) -> dict[str, Format]:
    """The shipped declared formats, and those of the files, by name.

    Raises:
        VerifyError: a file declares no format, or has the name of one of quantexp.
    """
    declared = dict(shipped_formats())
    for file in files:
        try:
            fmt = read_format(file)
        except FileNotFoundError as error:
            raise VerifyError(f"there is no file {file}") from error
        except (OSError, ValueError, UnreadableError) as error:
            raise VerifyError(str(error)) from error
        if declared.setdefault(fmt.name, fmt) != fmt:
            raise VerifyError(
                f"{file} has the name of a format of quantexp; give the file another name"
            )
    return declared


def chosen_devices(name: str | None) -> tuple[str, ...]:
    """The devices of `--device`; all available ones without it.

    Raises:
        VerifyError: there is no CUDA device.
    """
    if name is not None and name not in devices():
        raise VerifyError("this machine has no CUDA device: leave --device out, or give cpu")
    return devices() if name is None else (name,)


def run_verify(
    names: str | None,
    device: str | None,
    cache: Path,
    console: Console,
    files: Sequence[Path] = (),
) -> Outcome:
    """Verify, with a live line on a terminal, and store a certificate for each device; `files` declare formats.

    Verifying a part of the formats stores no certificate unless a value differed, and verifying files never does.

    Raises:
        VerifyError: an unknown format or device, or a certificate that cannot be written.
    """
    declared = declared_in(files)
    subjects, on = chosen_subjects(names, files), chosen_devices(device)
    placed = place(on, kernels.KERNELS)
    oracles, absent = find_oracles()
    versions = {oracle.name: oracle.version for oracle in oracles}
    start = time.monotonic()
    with _live_line(subjects, console) as tell:
        rows = verify(subjects, placed, oracles, tell, declared).rows
    seconds = time.monotonic() - start
    certificates = []
    for device_type in on:
        labels = [p.label for p in placed if p.device == device_type]
        about = [asdict(row) for row in rows if row.kernel in (*labels, GOLD)]
        certificate: Certificate = certify(
            device_type, about, labels, subjects, versions, absent, seconds
        )
        if subjects == chosen_subjects(None) or not (certificate.passed or files):
            certificates.append(save(certificate, cache))
    return Outcome(rows, subjects, versions, absent, seconds, certificates)


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
