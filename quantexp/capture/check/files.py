"""Accounts for every file below a capture folder: each is a list, the report, or named by a line."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantexp.capture.captured import whole_tensors
from quantexp.capture.check.problem import Listed, Problem
from quantexp.capture.lines import lists_of
from quantexp.capture.reader import Capture, CapturedTensor
from quantexp.capture.report import REPORT, summary
from quantexp.capture.store.manifest import HASHES, INDEX, digest_of
from quantexp.errors import UnreadableError
from quantexp.folders import PART
from quantexp.model.safetensors_header import Entry
from quantexp.reading.json_files import require_json
from quantexp.runs.dossiers import DOSSIER

#: Earlier attempts, in a capture folder outside of its run.
_ATTEMPTS = "attempts"


def files_below(folder: Path) -> list[str]:
    """The paths of all files below the folder, without those of earlier attempts; links are not followed."""
    files = []
    for parent, folders, names in os.walk(folder):
        if Path(parent) == folder and _ATTEMPTS in folders:
            folders.remove(_ATTEMPTS)
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        files += [str((Path(parent) / name).relative_to(folder)) for name in [*names, *links]]
    return sorted(files)


def check_files(
    folder: Path, files: Sequence[str], manifest: Sequence[Listed], *, is_live: bool
) -> Iterator[Problem]:
    """Files that no line names, and temporary files that a writer left."""
    listed = {str(line.content["file"]) for line in manifest if line.content.get("file")}
    known = {*(file.name for file in lists_of(folder)), REPORT, INDEX, HASHES, DOSSIER} | listed
    for file in files:
        if file in known or is_live:
            continue
        name = Path(file).name
        if name.endswith(PART) or name.startswith("."):
            yield Problem(file, "a temporary file that its writer left")
        else:
            yield Problem(file, "no line names it")


def check_shards(
    headers: Mapping[str, Mapping[str, Entry]], manifest: Sequence[Listed]
) -> Iterator[Problem]:
    """Tensors of shards that no line names."""
    listed = {(line.content.get("file"), line.content.get("key")) for line in manifest}
    for file, header in headers.items():
        for key in header:
            if (file, key) not in listed:
                yield Problem(file, f"no line names its tensor {key}")


def check_ends(folder: Path, manifest: Sequence[Listed], *, is_complete: bool) -> Iterator[Problem]:
    """What is written when a run ends: the shards' index, the counts, the hashes of the lists.

    A killed run may lack each of them, a completed one none.
    """
    report = None
    if (folder / REPORT).exists() or (is_complete and manifest):
        report = yield from check_report(folder, manifest)
    if (folder / HASHES).exists() or (report is not None and "hashes" in report):
        yield from check_hashes(folder)
    has_keys = any(line.content.get("key") is not None for line in manifest)
    if (folder / INDEX).exists() or (has_keys and (is_complete or (folder / HASHES).exists())):
        yield from check_index(folder, manifest)


def check_index(folder: Path, manifest: Sequence[Listed]) -> Iterator[Problem]:
    """Differences between the shards' index and the manifest."""
    lines = {
        str(line.content["key"]): line.content
        for line in manifest
        if line.content.get("key") is not None
    }
    expected = {
        "metadata": {"total_size": sum(_natural(each.get("bytes")) for each in lines.values())},
        "weight_map": {key: each.get("file") for key, each in lines.items()},
    }
    content = yield from _read(folder, INDEX)
    if content is not None and content != expected:
        yield Problem(INDEX, "it differs from the manifest: weight_map or total_size")


def check_report(
    folder: Path, manifest: Sequence[Listed]
) -> Generator[Problem, None, dict[str, Any] | None]:
    """Counts of report.json that differ from those of the manifest; the generator's value is the report."""
    content = yield from _read(folder, REPORT)
    if content is None:
        return None
    entries = [
        CapturedTensor.of(folder, line.content) for line in manifest if "tensor" in line.content
    ]
    try:
        counts = json.loads(json.dumps(summary(Capture(folder, whole_tensors(entries)))))
    except (TypeError, ValueError, AttributeError):
        yield Problem(REPORT, "the lines of the manifest cannot be counted")
        return content
    if "hashes" in content:  # earlier versions wrote none
        counts["hashes"] = HASHES
    for key in dict.fromkeys([*counts, *content]):
        different = list(_differences(key, content.get(key), counts.get(key)))
        if key != "folder" and different:
            name, recorded, counted = different[0]
            more = f"; {len(different) - 1} more of {key} differ" if len(different) > 1 else ""
            yield Problem(
                REPORT, f"{name} is {_short(recorded)}, the manifest has {_short(counted)}{more}"
            )
    return content


def _differences(
    name: str, recorded: object, counted: object
) -> Iterator[tuple[str, object, object]]:
    """The innermost keys with different values: `by_layer.0.tensors`, 32, 30."""
    if isinstance(recorded, dict) and isinstance(counted, dict):
        for key in dict.fromkeys([*counted, *recorded]):
            yield from _differences(f"{name}.{key}", recorded.get(key), counted.get(key))
    elif recorded != counted:
        yield name, recorded, counted


def check_hashes(folder: Path) -> Iterator[Problem]:
    """Lists that are not what they were when the run ended."""
    content = yield from _read(folder, HASHES)
    if content is None:
        return
    names = {file.name for file in lists_of(folder)}
    for name in sorted({*content, *names}):
        if name not in names:
            yield Problem(name, f"it is missing, and {HASHES} has its hash")
            continue
        if name not in content:
            yield Problem(name, f"{HASHES} has no hash of it")
            continue
        try:
            actual = digest_of(folder / name)
        except UnreadableError:
            continue  # `read_list` names it
        if content[name] != actual:
            recorded = content[name] if isinstance(content[name], dict) else {}
            yield Problem(
                name,
                f"it is not what it was when the run ended: {actual['lines']} lines and {actual['bytes']} bytes, "
                f"{recorded.get('lines')} and {recorded.get('bytes')} were written",
            )


def _read(folder: Path, name: str) -> Generator[Problem, None, dict[str, Any] | None]:
    """The content of a JSON file of the folder (the generator's value); None with a problem if it cannot be read."""
    try:
        return require_json(folder / name, dict[str, Any])
    except UnreadableError as error:
        yield Problem(name, str(error).removeprefix(f"{folder / name}").lstrip(":, "))
    return None


def _natural(value: object) -> int:
    return value if isinstance(value, int) else 0


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
