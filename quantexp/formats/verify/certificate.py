"""The certificate of `quantexp verify`: what was compared, with what result, kept where every run of the user finds it.

One file for each source of the formats, torch version and device, in `<cache>/verify/`. A run carries the one that is
about what it runs, or the words that there is none; a certificate of a failure is carried as such. What it covers is
the source of `quantexp.formats` alone: the matrix products around it are the business of the proof of engagement.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from quantexp import __version__
from quantexp.errors import VerifyError
from quantexp.runs.status import now, write_json

#: Hex digits of the digest of the formats' source.
DIGITS = 16
#: Endings of the files that are source.
_SOURCES = {".py", ".c", ".h"}
REMEDY = "run quantexp verify"


class State(StrEnum):
    """Whether the numerics of a run were verified."""

    VERIFIED = "verified"
    FAILED = "failed"
    #: there is a certificate for this device, but for another source of the formats or another torch.
    ANOTHER_VERSION = "verified for another version"
    NOT_VERIFIED = "not verified"


@dataclass(frozen=True)
class Certificate:
    """What one run of `quantexp verify` found for one device."""

    passed: bool
    quantexp: str
    #: digest of the source of `quantexp.formats`.
    formats_source: str
    torch: str
    #: what was computed on, see `device_kind`.
    device: str
    platform: str
    created: str
    seconds: float
    kernels: list[str]
    #: formats, and the transform, that were looked at.
    subjects: list[str]
    #: name -> version.
    oracles: dict[str, str]
    #: name -> why it was not asked.
    absent: dict[str, str]
    #: format, kernel, oracle, cases, mismatches and examples of mismatches.
    rows: list[dict[str, Any]]

    @property
    def cases(self) -> int:
        """Values compared."""
        return sum(int(row["cases"]) for row in self.rows)

    @property
    def mismatches(self) -> int:
        """Values that differed."""
        return sum(int(row["mismatches"]) for row in self.rows)


@dataclass(frozen=True)
class Standing:
    """What is known about the numerics that run here."""

    state: State
    words: str
    certificate: Certificate | None = None

    def record(self) -> dict[str, Any]:
        """As provenance.json has it."""
        certificate = None if self.certificate is None else asdict(self.certificate)
        return {"state": self.state.value, "words": self.words, "certificate": certificate}


@cache
def formats_source() -> str:
    """The digest of the formats' source as it is imported here, without that of their verification."""
    import quantexp.formats

    folder = Path(str(quantexp.formats.__file__)).parent
    digest = hashlib.sha256()
    files = (f for f in folder.rglob("*") if f.suffix in _SOURCES)
    for file in sorted(f for f in files if folder / "verify" not in f.parents):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:DIGITS]


def device_kind(device: str) -> str:
    """The GPU's name; of a CPU its architecture and the vector instructions that torch uses there.

    Args:
        device: `cpu` or `cuda`.
    """
    import torch

    if device == "cuda":
        return torch.cuda.get_device_name()
    capability = torch.backends.cpu.get_cpu_capability()
    return f"cpu ({platform.machine()}, {capability})"


def folder_in(cache: Path) -> Path:
    """Where certificates are."""
    return cache / "verify"


def save(certificate: Certificate, cache: Path) -> Path:
    """Keep a certificate, in the place of an earlier one about the same.

    Raises:
        VerifyError: it cannot be written.
    """
    parts = (certificate.formats_source, f"torch-{certificate.torch}", certificate.device)
    name = re.sub(r"[^A-Za-z0-9.+-]+", "-", "_".join(parts)).strip("-")
    file = folder_in(cache) / f"{name}.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, asdict(certificate))
    except OSError as error:
        raise VerifyError(
            f"the certificate cannot be written to {file.parent}: {error.strerror}; set paths.cache=FOLDER"
        ) from error
    return file


def standing(cache: Path, device: str) -> Standing:
    """What the certificates say about the formats as imported here, with this torch, on a device (`cpu` or `cuda`)."""
    import torch

    kind = device_kind(device)
    found = sorted(_certificates(cache), key=lambda one: one.created)
    here = [one for one in found if one.device == kind]
    mine = (formats_source(), str(torch.__version__))
    for one in reversed(here):
        if (one.formats_source, one.torch) == mine:
            return _judged(one)
    if here:
        last = here[-1]
        differs = "other formats" if last.formats_source != mine[0] else f"torch {last.torch}"
        return Standing(
            State.ANOTHER_VERSION,
            f"not verified as it runs: the certificate of {last.created[:10]} is for {differs}; {REMEDY}",
        )
    if found:
        return Standing(
            State.NOT_VERIFIED,
            f"not verified on this device, {kind}: there is a certificate for {found[-1].device}; {REMEDY}",
        )
    return Standing(State.NOT_VERIFIED, f"not verified: {REMEDY}")


def _judged(one: Certificate) -> Standing:
    if not one.passed:
        wrong = ", ".join(sorted({str(row["format"]) for row in one.rows if row["mismatches"]}))
        return Standing(
            State.FAILED,
            f"verification failed on {one.created[:10]}: {one.mismatches:,} of {one.cases:,} values differ, in {wrong}",
            one,
        )
    asked = ", ".join(
        ["exact gold", *(f"{name} {version}" for name, version in one.oracles.items())]
    )
    absent = f"; absent: {', '.join(one.absent)}" if one.absent else ""
    return Standing(
        State.VERIFIED,
        f"verified on {one.created[:10]}: {one.cases:,} values, against {asked}{absent}",
        one,
    )


def _certificates(cache: Path) -> Iterator[Certificate]:
    """Every one that can be read; what is none, or of another version of this file's form, is not there."""
    for file in folder_in(cache).glob("*.json"):
        try:
            yield Certificate(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):
            continue


def certify(
    device: str,
    rows: list[dict[str, Any]],
    kernels: list[str],
    subjects: list[str],
    oracles: dict[str, str],
    absent: dict[str, str],
    seconds: float,
) -> Certificate:
    """What was found, with what it was found for."""
    import torch

    return Certificate(
        passed=not any(row["mismatches"] for row in rows),
        quantexp=__version__,
        formats_source=formats_source(),
        torch=str(torch.__version__),
        device=device_kind(device),
        platform=platform.platform(),
        created=now(),
        seconds=round(seconds, 1),
        kernels=kernels,
        subjects=subjects,
        oracles=oracles,
        absent=absent,
        rows=rows,
    )
