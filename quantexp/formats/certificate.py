"""The certificate of `quantexp verify`: what was compared, and with what result; stored where every run finds it.

There is one file for each source digest of the formats, torch version and device, in `<cache>/verify/`. A run records
the certificate that matches its numerics, or a message that there is none; a failed verification is recorded too. A
certificate covers only the source of `quantexp.formats`: the proof of engagement covers the matrix products.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from quantexp import __version__
from quantexp.errors import UnreadableError, VerifyError
from quantexp.reading.json_files import require_json
from quantexp.runs.status import now, write_json

#: Hex digits of the digest of the formats' source.
DIGITS = 16
#: Suffixes of source files.
_SOURCES = {".py", ".c", ".h"}
REMEDY = "run quantexp verify"


class State(StrEnum):
    """Whether the numerics of a run were verified."""

    VERIFIED = "verified"
    FAILED = "failed"
    #: The certificate for this device is for another source of the formats or another torch version.
    ANOTHER_VERSION = "verified for another version"
    NOT_VERIFIED = "not verified"


@dataclass(frozen=True)
class Certificate:
    """The results of one run of `quantexp verify` on one device."""

    passed: bool
    quantexp: str
    #: Digest of the source of `quantexp.formats`.
    formats_source: str
    torch: str
    #: The device of the computation, see `device_kind`.
    device: str
    platform: str
    created: str
    seconds: float
    kernels: list[str]
    #: The verified formats and the transform.
    subjects: list[str]
    #: Name -> version.
    oracles: dict[str, str]
    #: Name -> reason why it was not used.
    absent: dict[str, str]
    #: Format, kernel, oracle, cases, mismatches and examples of mismatches.
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
    """The verification status of the numerics on this machine."""

    state: State
    words: str
    certificate: Certificate | None = None

    def record(self) -> dict[str, Any]:
        """The entry in provenance.json."""
        certificate = None if self.certificate is None else asdict(self.certificate)
        return {"state": self.state.value, "words": self.words, "certificate": certificate}


@cache
def formats_source() -> str:
    """The digest of the source of the imported formats, without this file."""
    import quantexp.formats

    folder = Path(str(quantexp.formats.__file__)).parent
    digest = hashlib.sha256()
    files = (f for f in folder.rglob("*") if f.suffix in _SOURCES)
    for file in sorted(f for f in files if f != folder / Path(__file__).name):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:DIGITS]


def device_kind(device: str) -> str:
    """The GPU's name; for a CPU its architecture and the vector instructions that torch uses.

    Args:
        device: `cpu` or `cuda`.
    """
    import torch

    if device == "cuda":
        return torch.cuda.get_device_name()
    capability = torch.backends.cpu.get_cpu_capability()
    return f"cpu ({platform.machine()}, {capability})"


def folder_in(cache: Path) -> Path:
    """The folder of certificates."""
    return cache / "verify"


def save(certificate: Certificate, cache: Path) -> Path:
    """Store a certificate, replacing an earlier one with the same key.

    Raises:
        VerifyError: the file cannot be written.
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
    """The verification status of the imported formats with this torch on a device (`cpu` or `cuda`)."""
    import torch

    kind = device_kind(device)
    certificates = sorted(_certificates(cache), key=lambda certificate: certificate.created)
    for_device = [certificate for certificate in certificates if certificate.device == kind]
    key = (formats_source(), str(torch.__version__))
    for certificate in reversed(for_device):
        if (certificate.formats_source, certificate.torch) == key:
            return _judged(certificate)
    if for_device:
        last = for_device[-1]
        differs = "other formats" if last.formats_source != key[0] else f"torch {last.torch}"
        return Standing(
            State.ANOTHER_VERSION,
            f"not verified as it runs: the certificate of {last.created[:10]} is for {differs}; {REMEDY}",
        )
    if certificates:
        return Standing(
            State.NOT_VERIFIED,
            f"not verified on this device, {kind}: there is a certificate for {certificates[-1].device}; {REMEDY}",
        )
    return Standing(State.NOT_VERIFIED, f"not verified: {REMEDY}")


def _judged(certificate: Certificate) -> Standing:
    date, cases = certificate.created[:10], f"{certificate.cases:,}"
    if not certificate.passed:
        failed = {str(row["format"]) for row in certificate.rows if row["mismatches"]}
        return Standing(
            State.FAILED,
            f"verification failed on {date}: {certificate.mismatches:,} of {cases} values differ, in "
            f"{', '.join(sorted(failed))}",
            certificate,
        )
    oracles = [f"{name} {version}" for name, version in certificate.oracles.items()]
    absent = f"; absent: {', '.join(certificate.absent)}" if certificate.absent else ""
    return Standing(
        State.VERIFIED,
        f"verified on {date}: {cases} values, against {', '.join(['exact gold', *oracles])}{absent}",
        certificate,
    )


def _certificates(cache: Path) -> Iterator[Certificate]:
    """Every readable certificate; files that are invalid or of another schema are skipped."""
    for file in folder_in(cache).glob("*.json"):
        try:
            yield Certificate(**require_json(file, dict[str, Any]))
        except (UnreadableError, TypeError):
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
    """A certificate of these results."""
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
