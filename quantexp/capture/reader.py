"""Reads captured tensors: selects them by metadata, and loads their values lazily, memory-mapped.

Opening a capture reads only the manifest (and its parts, while a run of several processes is running), or the file
names of an old collection without a manifest. Values are paged in from disk on access, so a collection may be larger
than memory. No file in a capture folder can run code: files are read as tensors and plain data, and anything else is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from quantexp.capture.captured import CapturedTensor, whole_tensors
from quantexp.capture.lines import LOG, lists_of, readable_lines, unlisted
from quantexp.capture.names import metadata_of
from quantexp.capture.store.manifest import MANIFEST, STATISTICS
from quantexp.capture.store.values import identity
from quantexp.errors import CaptureError, UnreadableError
from quantexp.folders import user_path
from quantexp.formats.definitions.files import know_format
from quantexp.reading.yaml_files import read_yaml
from quantexp.runs.paths import RunDir
from quantexp.runs.recorded_config import moved
from quantexp.terminal.escaping import printable

__all__ = [
    "Capture",
    "CapturedTensor",
    "capture_folder",
    "old_collection",
    "open_capture",
    "together",
]

#: The criterion for a key: a value, a shell pattern, several of them, or a function of the value.
Criterion = object


class Capture(Collection[CapturedTensor]):
    """The tensors of a capture folder, or some of them."""

    def __init__(
        self, folder: Path, entries: list[CapturedTensor], damage: Sequence[str] = ()
    ) -> None:
        self.folder, self._entries = folder, entries
        #: What is wrong with lines of the lists, which are left out.
        self.damage = tuple(damage)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[CapturedTensor]:
        return iter(self._entries)

    def __contains__(self, entry: object) -> bool:
        return entry in self._entries

    def __getitem__(self, index: int) -> CapturedTensor:
        return self._entries[index]

    def select(self, **criteria: Criterion) -> Capture:
        """The tensors whose metadata fit all criteria.

        Each key of the metadata takes a value (`layer=0`), a shell pattern (`tensor="grad_*"`), several of
        them (`module=["fc1", "fc2"]`) or a function of the value (`iteration=lambda i: i > 100`).

        Raises:
            CaptureError: no tensor has the key.
        """
        keys = {key for entry in self._entries for key in entry.metadata}
        for key in criteria:
            if self._entries and key not in keys:
                raise CaptureError(
                    f"{key} must be a key of the metadata, one of {', '.join(sorted(keys))}"
                )
        fitting = [
            entry
            for entry in self._entries
            if all(_fits(entry.metadata.get(key), value) for key, value in criteria.items())
        ]
        return Capture(self.folder, fitting, self.damage)

    def with_values(self) -> Capture:
        """The tensors with values, without repeats: a weight is listed for forward and backward."""
        stored = [entry for entry in self._entries if entry.metadata.get("file")]
        first = {(entry.folder, identity(entry.metadata)): entry for entry in reversed(stored)}
        return Capture(self.folder, list(first.values())[::-1], self.damage)

    def described(self) -> list[CapturedTensor]:
        """The tensors with statistics and without values."""
        return [
            entry
            for entry in self._entries
            if entry.metadata.get("statistics") and not entry.metadata.get("file")
        ]

    @property
    def num_bytes(self) -> int:
        """The bytes of the values, without repeats."""
        return sum(int(entry.metadata.get("bytes") or 0) for entry in self.with_values())

    def rows(self) -> list[dict[str, Any]]:
        """The manifest as plain dictionaries."""
        return [dict(entry.metadata) for entry in self._entries]

    def dataframe(self) -> Any:
        """The manifest as a pandas DataFrame, a column for each key.

        Raises:
            CaptureError: pandas is not installed.
        """
        try:
            import pandas  # type: ignore[import-untyped, unused-ignore]
        except ImportError as error:
            raise CaptureError("a DataFrame needs pandas: install it, or use rows()") from error
        return pandas.DataFrame(self.rows())


def capture_folder(folder: str | Path) -> Path:
    """The folder of captured tensors that a path names: itself, or that of a run.

    Raises:
        CaptureError: the folder does not exist.
    """
    folder = place_of_captures(user_path(folder))
    if not folder.is_dir():
        raise CaptureError(f"there is no folder {folder}; give the tensors folder of a run")
    return folder


def place_of_captures(folder: Path) -> Path:
    """The folder with the captured tensors of a run or of a capture folder, which need not exist.

    They are in it, in its `tensors/`, or where its run wrote them (`capture.dir`).
    """
    if (folder / MANIFEST).is_file():
        return folder
    elsewhere = _capture_dir(RunDir(folder.absolute()))
    if elsewhere is not None:
        return RunDir(folder.absolute()).captured(elsewhere)
    return folder / "tensors" if (folder / "tensors").is_dir() else folder


def _capture_dir(run: RunDir) -> str | None:
    """`capture.dir` of a run; None if it is not set, or if this is not a run.

    Read without the schema, which another version of quantexp may have written.
    """
    try:
        config = read_yaml(run.config)
        value, root = config["capture"]["dir"], config["paths"]["root"]
    except (FileNotFoundError, UnreadableError, KeyError, TypeError):
        return None
    if not isinstance(value, str) or not isinstance(root, str):
        return None
    return moved(value, root, run.root.parent)


def open_capture(folder: str | Path, *others: str | Path, statistics: bool = False) -> Capture:
    """The captured tensors of a folder: a run's `tensors/`, the run itself, or an old collection without a manifest.

    Those of a run with `capture.dir` are read from there. A tensor that ranks stored in parts is one entry; `others`
    are the folders of a run whose ranks wrote to different ones.

    With `statistics`, tensors with statistics only, which have no values, follow the others.

    Raises:
        CaptureError: a folder does not exist, or has no captured tensors.
    """
    folders = [capture_folder(each) for each in (folder, *others)]
    damage: list[str] = []
    entries = [entry for each in folders for entry in _entries(each, damage, statistics=statistics)]
    return Capture(folders[0], together(entries, damage), damage)


def together(entries: Iterable[CapturedTensor], damage: list[str]) -> list[CapturedTensor]:
    """`whole_tensors`, which warns of parts that fit no tensor and adds them to `damage`."""

    def report(error: CaptureError) -> None:
        damage.append(str(error))
        LOG.warning("%s; it is left out", printable(str(error)))

    return whole_tensors(entries, report)


def _entries(folder: Path, damage: list[str], *, statistics: bool) -> list[CapturedTensor]:
    """The entries of one folder as its lines have them, and what is wrong with lines."""
    wrong: list[UnreadableError] = []
    listings = lists_of(folder, MANIFEST)
    lines = [line for file in listings for line in readable_lines(file, wrong.append)]
    entries = lines or list(old_collection(folder))
    if statistics:
        entries = entries + list(_statistics_only(folder, lines, wrong.append))
    if wrong and not entries:
        raise CaptureError(
            f"{folder} holds no captured tensors that can be read: {wrong[0]}"
        ) from wrong[0]
    if not entries and next(_statistics_only(folder, [], wrong.append), None) is not None:
        raise CaptureError(
            f"{folder} holds no captured tensors: statistics alone were kept; run with capture=tensors"
        )
    if not entries:
        raise CaptureError(
            f"{folder} holds no captured tensors: neither a {MANIFEST} nor files with their names; run with "
            "capture=tensors"
        )
    damage += map(str, wrong)
    _know_formats(folder, entries)
    return [CapturedTensor.of(folder, entry) for entry in entries]


def _know_formats(folder: Path, entries: Iterable[dict[str, Any]]) -> None:
    """Make the declared formats of the slots known by their names.

    Raises:
        CaptureError: a definition is none of this version, or two captures define a name differently.
    """
    seen: set[tuple[str, str]] = set()
    for entry in entries:
        judged = (entry.get("statistics") or {}).get("fidelity")
        for record in (*(entry.get("formats") or {}).values(), judged or {}):
            if (
                "definition" in record
                and (key := (record["format"], record["definition"])) not in seen
            ):
                seen.add(key)
                try:
                    know_format(record)
                except ValueError as error:
                    raise CaptureError(f"{folder}: {error}") from error


def _statistics_only(
    folder: Path, lines: list[dict[str, Any]], report: Callable[[UnreadableError], None]
) -> Iterator[dict[str, Any]]:
    """The lines of statistics without a line in the manifest."""
    listings = lists_of(folder, STATISTICS)
    statistics = (line for file in listings for line in readable_lines(file, report))
    yield from unlisted(statistics, lines)


def old_collection(folder: Path) -> Iterator[dict[str, Any]]:
    """The tensors of a folder without a manifest, by the names of their files; a file with several names is one."""
    known = set()
    for path in sorted(folder.rglob("*.pt")):
        metadata = metadata_of(path.name)
        if metadata is None:
            continue
        stat = path.stat()
        if (stat.st_dev, stat.st_ino) not in known:
            known.add((stat.st_dev, stat.st_ino))
            yield {**metadata, "file": str(path.relative_to(folder)), "bytes": stat.st_size}


def _fits(value: object, criterion: Criterion) -> bool:
    if callable(criterion):
        return bool(criterion(value))
    if isinstance(criterion, str):
        return value is not None and fnmatchcase(str(value), criterion)
    if isinstance(criterion, list | tuple | set | frozenset | range):
        return any(_fits(value, alternative) for alternative in criterion)
    return value == criterion
