"""provenance.json: versions, code, commit and uncommitted changes, source snapshot, host, command line, hashed content.

It holds no environment variables, and the uncommitted changes of files of source alone (`quantexp.runs.source_files`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from quantexp import __version__
from quantexp.reading.json_files import require_json
from quantexp.runs.code_digest import DECIDING, OF_MEGATRON_LM, code_digest
from quantexp.runs.precision import PrecisionEntry
from quantexp.runs.redaction import redacted
from quantexp.runs.source_files import git_output, is_source
from quantexp.runs.status import now, write_json


class Source(TypedDict):
    """The state of quantexp's own source; None values if it is not a git checkout."""

    commit: str | None
    diff: str | None
    untracked: NotRequired[list[str]]
    #: The name of the snapshot's folder.
    snapshot: NotRequired[str]


class Ran(TypedDict):
    """The machine on which the last attempt ran."""

    host: str
    device: str
    packages: dict[str, str | None]
    started: str
    products: NotRequired[str]


class Provenance(TypedDict):
    """The content of provenance.json."""

    quantexp: str
    python: str
    packages: dict[str, str | None]
    #: The digest of the code that decides numbers, at the first start.
    code: str
    source: Source
    host: str
    platform: str
    command: list[str]
    folder: str
    created: str
    #: The content that the run's hash covers.
    identity: dict[str, Any]
    #: The source of formats in Python, by their names.
    formats: NotRequired[dict[str, str]]
    ran: NotRequired[Ran]
    #: The verdict of `quantexp verify` on the numerics of the device.
    verified: NotRequired[dict[str, Any]]
    #: The later starts of the attempt.
    starts: NotRequired[list[Start]]


class Start(TypedDict):
    """A start that goes on from a checkpoint, and what is not as at the start before it."""

    created: str
    goes_on_from: int
    host: str
    folder: str
    command: list[str]
    #: As that of the first start; missing where an earlier version of quantexp went on.
    code: NotRequired[str]
    changed: list[str]


class RecordedSource(TypedDict, total=False):
    """`Source` as any version of quantexp may have written it."""

    commit: str | None
    diff: str | None
    untracked: list[str]
    snapshot: str


class RecordedRan(TypedDict, total=False):
    """`Ran` as any version of quantexp may have written it."""

    host: str
    device: str
    packages: dict[str, str | None]
    started: str


class RecordedIdentity(TypedDict, total=False):
    """The keys of a run's identity whose content is read."""

    #: Pairs of an iteration and the precision map from there on.
    scheme: list[tuple[int, list[PrecisionEntry]]]
    conditions: list[tuple[dict[str, Any], list[tuple[int, list[PrecisionEntry]]]]]
    model: dict[str, Any]
    data: dict[str, Any]
    training: dict[str, Any]


class RecordedVerdict(TypedDict, total=False):
    """The verdict of `quantexp verify`."""

    state: str
    words: str
    certificate: dict[str, Any] | None


class RecordedProvenance(TypedDict, total=False):
    """`Provenance` as any version of quantexp may have written it."""

    quantexp: str
    python: str
    packages: dict[str, str | None]
    code: str
    source: RecordedSource
    host: str
    platform: str
    command: list[str] | None
    folder: str
    created: str
    identity: RecordedIdentity
    ran: RecordedRan
    verified: RecordedVerdict | None
    starts: list[Start]


def read_provenance(file: Path) -> RecordedProvenance:
    """The content of provenance.json.

    Raises:
        UnreadableError: names the file and what is wrong with it.
    """
    return require_json(file, RecordedProvenance)


def codes_of(recorded: Mapping[str, Any]) -> list[str | None]:
    """The digest of the code of each start of an attempt; None where it was not recorded."""
    return [start.get("code") for start in (recorded, *recorded.get("starts", ()))]


def change_of_code(recorded: Mapping[str, Any], new: Provenance) -> list[str]:
    """That a start goes on with other code than the one before it, in words; empty if it does not."""
    before = codes_of(recorded)[-1]
    return [] if before == new["code"] else [f"code {before or UNKNOWN_CODE} -> {new['code']}"]


#: Instead of a digest that was not recorded.
UNKNOWN_CODE = "not recorded"
#: The key of an identity that names the training loop of a run which quantexp's own loop did not train.
LOOP = "loop"
#: Packages whose versions affect the run.
PACKAGES = (
    "torch",
    "megatron-core",
    "hydra-core",
    "omegaconf",
    "numpy",
    "submitit",
    "transformer-engine",
    "triton",
)
#: What describes the source.
_OF_SOURCE = ("quantexp", "source")
#: The longest recorded diff, in characters.
LARGEST_DIFF = 1 << 20


def provenance(
    content: dict[str, Any],
    command: list[str],
    snapshot: Path | None,
    source: Source | None = None,
) -> Provenance:
    """The content of provenance.json at the start of a run.

    Args:
        content: the content that the run's hash covers.
        command: the command line.
        snapshot: the folder of the source snapshot; None if there is none.
        source: `checkout()` at the time of the snapshot; None calls it now.
    """
    content_of_source: Source = {**(source or checkout())}
    if snapshot is not None:
        content_of_source["snapshot"] = snapshot.name
    return {
        "quantexp": __version__,
        "python": platform.python_version(),
        "packages": versions(),
        "code": code_digest(
            snapshot and snapshot / "quantexp", DECIDING + OF_MEGATRON_LM * (LOOP in content)
        ),
        "source": content_of_source,
        "host": platform.node(),
        "platform": platform.platform(),
        "command": command,
        "folder": str(Path.cwd()),
        "created": now(),
        "identity": content,
    }


def add_start(
    file: Path, new: Provenance, iteration: int, changed: Sequence[str], *, replaces: bool = False
) -> None:
    """Add a start that goes on from the checkpoint of an iteration to provenance.json.

    If its source is another one, the top level describes that, and `changed` of the start says so. A start that was
    only prepared is replaced, and its changes are kept.
    """
    recorded: dict[str, Any] = dict(read_provenance(file))
    before, after = recorded.get("source", {}).get("snapshot"), new["source"].get("snapshot")
    starts: list[Start] = [*recorded.get("starts", [])]
    words = [*(starts.pop()["changed"] if replaces and starts else ()), *changed]
    if before != after:
        recorded |= {key: value for key, value in new.items() if key in _OF_SOURCE}
        words.append(f"source {before} -> {after}")
    words += [
        f"{name} {old} -> {new['packages'].get(name)}"
        for name, old in recorded["packages"].items()
        if old != new["packages"].get(name)
    ]
    start: Start = {
        "created": new["created"],
        "goes_on_from": iteration,
        "host": new["host"],
        "folder": new["folder"],
        "command": new["command"],
        "code": new["code"],
        "changed": words,
    }
    write_json(file, redacted({**recorded, "starts": [*starts, start]}))


def add_what_ran(
    file: Path, device: str, verified: dict[str, Any], products: str | None = None
) -> None:
    """Add the actual host, device and versions to provenance.json; a job need not run where it was submitted.

    Args:
        file: the run's provenance.json.
        device: `cpu`, or the GPU's name.
        verified: the verdict of the certificates of `quantexp verify` on the numerics of this device.
        products: a description of the matrix products in the run's precision; None leaves the key out.
    """
    ran: Ran = {"host": platform.node(), "device": device, "packages": versions(), "started": now()}
    if products is not None:
        ran["products"] = products
    write_json(file, {**read_provenance(file), "ran": ran, "verified": verified})


def versions() -> dict[str, str | None]:
    """The installed version of each of `PACKAGES`; None if it is not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


@functools.cache
def checkout() -> Source:
    """Commit and uncommitted changes of quantexp's source, read once; None values if it is not a git checkout."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return {"commit": None, "diff": None}
    changed = git_output(folder, "diff", "HEAD", "--name-only", "--no-renames", "-z") or ""
    names = [f":(literal){name}" for name in changed.split("\0") if is_source(name)]
    diff = git_output(folder, "diff", "HEAD", "--", *names) if names else ""
    commit = git_output(folder, "rev-parse", "HEAD")
    untracked = git_output(folder, "ls-files", "-z", "--others", "--exclude-standard") or ""
    return {
        "commit": commit and commit.strip(),
        "diff": diff and diff.strip()[:LARGEST_DIFF],
        "untracked": [name for name in untracked.split("\0") if name],
    }


def command_line() -> list[str]:
    """The command as it was typed."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
