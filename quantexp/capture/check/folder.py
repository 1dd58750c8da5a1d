"""`quantexp captures DIR --check`: what differs between the parts of a capture folder.

Damage is a difference between two records of the same thing, so everything that is recorded twice is compared:

    hashes.json         the bytes of both lists when the run ended
    manifest.jsonl      statistics.jsonl, report.json, the shards' headers and index, the metadata in each file
    each line           the values it names: hash, dtype, shape, statistics
    each file           a line

A selection limits the values that are read; lists and files are always checked as a whole. A folder that its run still
writes to has no ends to compare, and lines may be ahead of statistics; its finished lines are checked all the same.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantexp.capture.captured import part_of, whole_tensors
from quantexp.capture.check import lists
from quantexp.capture.check.lists import Listed, Problem
from quantexp.capture.check.tensors import check_reference, check_unlisted, check_values
from quantexp.capture.lines import lists_of
from quantexp.capture.reader import Capture, CapturedTensor, capture_folder, old_collection
from quantexp.capture.report import REPORT, summary
from quantexp.capture.store.manifest import (
    HASHES,
    INDEX,
    MANIFEST,
    STATISTICS,
    digest_of,
    index_of,
)
from quantexp.capture.store.values import identity
from quantexp.errors import CaptureError, DataError, UnreadableError
from quantexp.folders import PART
from quantexp.model.safetensors_header import Entry, read_header
from quantexp.reading.json_files import require_json
from quantexp.runs.dossiers import DOSSIER

#: Earlier attempts, in a capture folder outside of its run.
_ATTEMPTS = "attempts"
LIVE = "still being written"


@dataclass(frozen=True)
class Checked:
    """The result of a check."""

    #: The tensors with values, those of them with the manifest's hash, and those without a hash.
    num_tensors: int
    num_intact: int
    num_without_hash: int
    #: The lines of all lists, unreadable ones included, and the files below the folder.
    num_lines: int
    num_files: int
    problems: Sequence[Problem]
    #: What could not be checked, in words.
    notes: Sequence[str] = ()

    def summary(self) -> str:
        """The result in one line."""
        line = f"{self.num_intact} of {self.num_tensors} tensors have the values of the manifest's hash"
        if self.num_without_hash:
            line += f", {self.num_without_hash} have no hash to be checked by"
        line += f"; {self.num_lines} lines, {self.num_files} files"
        if self.problems:
            line += f", {len(self.problems)} problem{'s' * (len(self.problems) > 1)}"
        return "; ".join([line, *self.notes])


def check(
    folder: str | Path,
    patterns: Mapping[str, object] | None = None,
    *,
    is_live: bool = False,
    is_complete: bool = False,
    num_ranks: int | None = None,
) -> Checked:
    """Compare everything that a capture folder records twice.

    Args:
        folder: the folder, or a run's.
        patterns: selects the tensors whose values are read.
        is_live: a run still writes to the folder.
        is_complete: the run has completed, so its counts must be there.
        num_ranks: the processes of the run, if they are known.

    Raises:
        CaptureError: there is no such folder, nothing was captured in it, or a key to select by is unknown.
    """
    folder = capture_folder(folder)
    paths = files_below(folder)
    manifest, unread, num_lines = lists.read_list(folder, MANIFEST, is_live=is_live)
    statistics, unread_too, num_more = lists.read_list(folder, STATISTICS, is_live=is_live)
    problems = [*unread, *unread_too]
    for lines in (manifest, statistics):
        problems += lists.check_lines(lines)
    unlisted = [] if num_lines else list(old_collection(folder))
    if not (manifest or statistics or problems or unlisted):
        raise CaptureError(f"{folder} holds no captured tensors; run with capture=tensors")
    entries = [
        CapturedTensor.of(folder, content)
        for content in (*(line.content for line in manifest), *unlisted)
    ]
    selected = {id(entry) for entry in Capture(folder, entries).select(**(patterns or {}))}
    results: Counter[bool | None] = Counter()
    headers, damaged_shards = _headers(entries)
    problems += damaged_shards
    first = lists.owners(manifest)
    for line, entry in zip(manifest, entries, strict=not unlisted):
        if not line.content.get("file") or id(entry) not in selected:
            continue
        owner = first[identity(line.content)]
        if owner is not line:
            problems += map(line.problem, check_reference(line.content, owner.content))
            continue
        is_intact, differences = check_values(entry, headers)
        results[is_intact] += 1
        problems += map(line.problem, differences)
    for entry in entries[len(manifest) :]:
        if id(entry) in selected:
            results[None] += 1
            file = str(entry.metadata["file"])
            problems += (Problem(file, difference) for difference in check_unlisted(entry))
    problems += check_parts(folder, manifest, is_live=is_live)
    problems += check_shards(headers, manifest)
    if num_lines + num_more:
        problems += check_files(folder, paths, manifest, is_live=is_live)
        problems += lists.check_ranks([*manifest, *statistics], num_ranks) if not is_live else ()
    notes = [LIVE] if is_live else []
    if unlisted:
        notes.append(f"there is no {MANIFEST}: each file is compared with its own metadata")
    if not is_live:
        problems += lists.check_pairs(manifest, statistics)
        problems += check_ends(folder, manifest, is_complete=is_complete)
        if num_lines and not (folder / HASHES).exists():
            notes.append(f"there is no {HASHES} to check the lists by")
    return Checked(
        sum(results.values()),
        results[True],
        results[None],
        num_lines + num_more,
        len(paths),
        problems,
        notes,
    )


def _headers(
    entries: Sequence[CapturedTensor],
) -> tuple[dict[str, dict[str, Entry]], list[Problem]]:
    """The headers of all shards that can be read, and the problems of the others."""
    headers: dict[str, dict[str, Entry]] = {}
    problems: dict[str, Problem] = {}
    for entry in entries:
        file = str(entry.metadata.get("file"))
        if entry.metadata.get("key") is None or file in headers or file in problems:
            continue
        try:
            if entry.path.exists():  # else its line says so
                headers[file] = read_header(entry.path)
        except CaptureError:
            continue  # its line names no file of the folder, and is a problem itself
        except DataError as error:
            problems[file] = Problem(file, str(error))
    return headers, list(problems.values())


def check_parts(folder: Path, manifest: Sequence[Listed], *, is_live: bool) -> Iterator[Problem]:
    """Parts with impossible ranges and, once the run has ended, tensors without all of their parts."""
    parts = []
    for line in manifest:
        if "shard" not in line.content:
            continue
        entry = CapturedTensor.of(folder, line.content)
        try:
            part_of(entry)
        except ValueError as error:
            yield line.problem(f"its {error}")
        else:
            parts.append(entry)
    for tensor in whole_tensors(parts) if not is_live else ():
        if (why := tensor.incompleteness()) is not None:
            yield Problem(MANIFEST, f"{tensor.label}: {why}")


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
    if (folder / HASHES).exists() or report is not None:
        yield from check_hashes(folder)
    has_keys = any(line.content.get("key") is not None for line in manifest)
    if (folder / INDEX).exists() or (has_keys and (is_complete or (folder / HASHES).exists())):
        yield from check_index(folder, manifest)


def check_index(folder: Path, manifest: Sequence[Listed]) -> Iterator[Problem]:
    """Differences between the shards' index and the manifest."""
    content = yield from _read(folder, INDEX)
    if content is not None and content != index_of(line.content for line in manifest):
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


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
