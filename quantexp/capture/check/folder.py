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

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from quantexp.capture.check import files, lists
from quantexp.capture.check.parts import check_parts
from quantexp.capture.check.problem import Checked, Listed, Problem
from quantexp.capture.check.tensors import check_reference, check_values
from quantexp.capture.reader import Capture, CapturedTensor, capture_folder, old_collection
from quantexp.capture.store.manifest import HASHES, MANIFEST, STATISTICS
from quantexp.capture.store.values import identity
from quantexp.errors import CaptureError, DataError
from quantexp.model.safetensors_header import Entry, read_header

LIVE = "still being written"


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
    paths = files.files_below(folder)
    manifest, unread, num_lines = lists.read_list(folder, MANIFEST, is_live=is_live)
    statistics, unread_too, num_more = lists.read_list(folder, STATISTICS, is_live=is_live)
    problems = [*unread, *unread_too]
    for lines in (manifest, statistics):
        problems += lists.check_lines(lines)
    if not num_lines:
        manifest = [Listed(line["file"], 0, line) for line in old_collection(folder)]
    if not (manifest or statistics or problems):
        raise CaptureError(f"{folder} holds no captured tensors; run with capture=tensors")
    entries = [CapturedTensor.of(folder, line.content) for line in manifest]
    selected = {id(entry) for entry in Capture(folder, entries).select(**(patterns or {}))}
    results: Counter[bool | None] = Counter()
    headers, damaged_shards = _headers(entries)
    problems += damaged_shards
    first = lists.owners(manifest)
    for line, entry in zip(manifest, entries, strict=True):
        if not line.content.get("file") or id(entry) not in selected:
            continue
        owner = first[identity(line.content)]
        if owner is not line:
            problems += map(line.problem, check_reference(line.content, owner.content))
            continue
        is_intact, differences = check_values(entry, headers)
        results[is_intact] += 1
        problems += map(line.problem, differences)
    problems += check_parts(folder, manifest, is_live=is_live)
    problems += files.check_shards(headers, manifest)
    if num_lines + num_more:
        problems += files.check_files(folder, paths, manifest, is_live=is_live)
        problems += lists.check_ranks([*manifest, *statistics], num_ranks) if not is_live else ()
    notes = [LIVE] if is_live else []
    if not is_live:
        problems += lists.check_pairs(manifest, statistics)
        problems += files.check_ends(folder, manifest, is_complete=is_complete)
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
